"""Compiles a reasoning tree, runs the kernel on this machine's GPU or CPU, checks it and explains it."""

import torch

import treegen
from treegen.workloads.generate import reasoning


def main() -> None:
    """Prints the explanation, the device of the kernel, and its error against the float64 oracle."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tree = reasoning(seed=1)
    kernel = treegen.compile(tree)

    generator = torch.Generator(device).manual_seed(0)
    slots = tree.kv.last_slot + 1
    q = torch.randn(tree.num_rows, 32, 128, generator=generator, device=device).to(dtype)
    k_cache, v_cache = torch.randn(2, slots, 8, 128, generator=generator, device=device).to(dtype)

    report = kernel.verify(q, k_cache, v_cache)
    print(kernel.explain())
    print()
    print(f"ran on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}, backend {kernel.backend}")
    print(f"against the float64 oracle: {report}")
    if not report.passed:
        raise SystemExit("the output is wrong")


if __name__ == "__main__":
    main()
