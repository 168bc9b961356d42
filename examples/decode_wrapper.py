"""Serves a batch from its page table, step by step, with the interface of FlashInfer's decode wrapper."""

import torch

import treegen

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64


def main() -> None:
    """Decodes three steps of five requests over one prompt and checks every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    cache = torch.randn(64, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator, device=device).to(dtype)

    prompt, free = [0, 1, 2, 3], list(range(4, 64))
    pages = [[*prompt, free.pop()] for _ in range(5)]
    tokens = [len(prompt) * PAGE_SIZE + length for length in (1, 7, 16, 15, 3)]

    wrapper = treegen.TreeAttentionWrapper(kv_layout="NHD")
    for step in range(3):
        counts = torch.tensor([0, *map(len, pages)]).cumsum(0)
        last_page_len = [(length - 1) % PAGE_SIZE + 1 for length in tokens]
        flat = [page for listed in pages for page in listed]
        wrapper.plan(counts, flat, last_page_len, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=dtype)

        q = torch.randn(len(pages), HEADS, HEAD_DIM, generator=generator, device=device).to(dtype)
        out, lse = wrapper.run(q, cache, return_lse=True)  # lse in base 2
        report = wrapper.kernel.verify(q, cache[:, 0], cache[:, 1])
        print(f"step {step}: {wrapper.kernel.tree}, out {tuple(out.shape)}, lse {tuple(lse.shape)}: {report}")
        if not report.passed:
            raise SystemExit("the output is wrong")

        for request, length in enumerate(tokens):
            if length % PAGE_SIZE == 0:
                pages[request].append(free.pop())
            tokens[request] += 1


if __name__ == "__main__":
    main()
