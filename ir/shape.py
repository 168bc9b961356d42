"""Shape: the attention shape that a kernel serves (heads, head dims, types, pages)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treegen.ir.arrays import set_positive_ints
from treegen.ir.errors import ShapeError

DTYPES = ("fp16", "bf16", "fp32")
"""Types of q and out, and of caches."""
FP8 = ("e4m3", "e5m2")
"""Types of caches alone, with a q of 16 bits: torch.float8_e4m3fn and torch.float8_e5m2."""
DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1}
_DTYPE_NAMES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
MAX_HEAD_DIM = 576
"""The most elements of q and K: the latent and the rotary part of multi-head latent attention (MLA)."""
MAX_HEAD_DIM_V = 512
"""The most elements of V and out: 64 rows of such results fill the registers that two warp groups have for them."""
MAX_PAGE_SIZE = 1024
KV_LAYOUTS = ("NHD", "HND")
"""Layouts of a page: `[page_size, num_kv_heads, head_dim]` and `[num_kv_heads, page_size, head_dim]`."""


def dtype_name(argument: str, dtype: object, known: tuple[str, ...] = DTYPES) -> str:
    """Returns the short name of a torch dtype, or of any of its names. Raises ShapeError unless it is in `known`."""
    try:
        shown = str(dtype)
    except Exception:  # whatever a value's own `__str__` raises
        shown = type(dtype).__name__
    name = shown.removeprefix("torch.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in known:
        raise ShapeError(argument, shown, "is not a supported type", f"use one of {', '.join(known)}")
    return name


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes the attention that a kernel computes: heads, head dims, element types, and the KV cache's pages.

    A cache has the form `[slots, num_kv_heads, head_dim]` where page_size is 1, `[pages, page_size, num_kv_heads,
    head_dim]` in the layout "NHD", and `[pages, num_kv_heads, page_size, head_dim]` in the layout "HND".

    Args:
        num_qo_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        head_dim: Elements of q and K, a multiple of 8 up to 576.
        head_dim_v: Elements of V and out, a multiple of 8 up to 512; by default head_dim.
        dtype: The type of q and out: "fp16", "bf16", "fp32" or the torch dtype.
        kv_dtype: The type of the caches: by default dtype; or "e4m3" or "e5m2" with a dtype of 16 bits.
        page_size: Tokens of a page, up to 1024; 1 for a cache without pages.
        kv_layout: "NHD" or "HND".
        partial_dtype: The type of partial results until they are merged: "fp32", or dtype. 16 bits move half the bytes,
            and round each partial once more.
        shared_kv: Whether V is the first head_dim_v elements of K, in the same memory (`v_cache = k_cache[...,
            :head_dim_v]`, as in MLA). Its bytes then count once.

    Raises:
        ShapeError: A value is impossible or not supported.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bf16"
    kv_dtype: str = ""  # "": dtype
    page_size: int = 1
    kv_layout: str = "NHD"
    partial_dtype: str = "fp32"
    shared_kv: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name, default in (("head_dim_v", "head_dim"), ("kv_dtype", "dtype")):
            value = getattr(self, name)
            if value is None or (type(value) in (int, str) and not value):
                set_field(self, name, getattr(self, default))
        set_field(self, "dtype", dtype_name("dtype", self.dtype))
        set_field(self, "kv_dtype", dtype_name("kv_dtype", self.kv_dtype, (*DTYPES, *FP8)))
        set_field(self, "partial_dtype", dtype_name("partial_dtype", self.partial_dtype))
        numbers = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size")
        set_positive_ints(self, numbers, ShapeError)
        if self.num_qo_heads % self.num_kv_heads:
            reason = f"is not a multiple of num_kv_heads = {self.num_kv_heads}"
            raise ShapeError("num_qo_heads", self.num_qo_heads, reason, "give every KV head the same number of heads")
        for name, most in (("head_dim", MAX_HEAD_DIM), ("head_dim_v", MAX_HEAD_DIM_V)):
            if getattr(self, name) > most or getattr(self, name) % 8:
                reason = f"is not a multiple of 8 up to {most}"
                raise ShapeError(name, getattr(self, name), reason, "pad or split the head dimension")
        if self.kv_dtype != self.dtype and (self.kv_dtype not in FP8 or self.dtype == "fp32"):
            fix = "use one type, or fp8 caches (e4m3, e5m2) beside fp16 or bf16"
            raise ShapeError("kv_dtype", self.kv_dtype, f"differs from dtype = {self.dtype}", fix)
        if type(self.shared_kv) is not bool or (self.shared_kv and self.head_dim_v > self.head_dim):
            reason = f"does not go with head_dim = {self.head_dim}, head_dim_v = {self.head_dim_v}"
            raise ShapeError("shared_kv", self.shared_kv, reason, "give True where V is the beginning of K, else False")
        if self.partial_dtype not in ("fp32", self.dtype):
            reason = f"is neither fp32 nor dtype = {self.dtype}"
            raise ShapeError("partial_dtype", self.partial_dtype, reason, "use one of these")
        if self.page_size > MAX_PAGE_SIZE:
            raise ShapeError("page_size", self.page_size, f"exceeds {MAX_PAGE_SIZE}", "use smaller pages")
        if not isinstance(self.kv_layout, str) or self.kv_layout not in KV_LAYOUTS:
            raise ShapeError("kv_layout", self.kv_layout, "is unknown", f"use one of {', '.join(KV_LAYOUTS)}")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def divided(self, ranks: int, *, replicate_kv: bool = False) -> Shape:
        """Returns the shape of each of several ranks that divide the heads, as in tensor parallelism.

        Args:
            ranks: The number of ranks.
            replicate_kv: Whether several ranks may hold one KV head, where there are more ranks than KV heads.

        Raises:
            ShapeError: The ranks do not divide the query heads or the KV heads.
        """
        if self.num_qo_heads % ranks:
            reason = f"are no multiple of {ranks} ranks"
            raise ShapeError("num_qo_heads", self.num_qo_heads, reason, "divide heads among fewer ranks")
        whole = self.num_kv_heads % ranks == 0
        shared = ranks % self.num_kv_heads == 0
        if not whole and not (shared and replicate_kv):
            fix = "divide heads among fewer ranks"
            if shared:
                fix += ", or hold KV heads several times with replicate_kv=True"
            raise ShapeError("num_kv_heads", self.num_kv_heads, f"are no multiple of {ranks} ranks", fix)
        kv_heads = self.num_kv_heads // ranks if whole else 1
        return replace(self, num_qo_heads=self.num_qo_heads // ranks, num_kv_heads=kv_heads)

    def cache_sizes(self, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of a K and a V cache of this many pages, or slots where page_size is 1."""
        heads, tokens = (self.num_kv_heads,), () if self.page_size == 1 else (self.page_size,)
        of_page = tokens + heads if self.kv_layout == "NHD" else heads + tokens
        return (pages, *of_page, self.head_dim), (pages, *of_page, self.head_dim_v)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of q and out."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values over all KV heads; values that are part of the keys count once."""
        dims = self.head_dim if self.shared_kv else self.head_dim + self.head_dim_v
        return self.num_kv_heads * dims * DTYPE_BYTES[self.kv_dtype]

    @property
    def partial_bytes(self) -> int:
        """Bytes of one partial result of a row over all query heads: its out, and its lse in float32."""
        return self.num_qo_heads * (self.head_dim_v * DTYPE_BYTES[self.partial_dtype] + DTYPE_BYTES["fp32"])

    def __str__(self) -> str:
        of_v = f" (v {self.head_dim_v})" if self.head_dim_v != self.head_dim else ""
        besides = {
            f"KV {self.kv_dtype}": self.kv_dtype != self.dtype,
            f"partials {self.partial_dtype}": self.partial_dtype != "fp32",
            "shared KV": self.shared_kv,
            f"page_size {self.page_size}": self.page_size > 1,
            self.kv_layout: self.kv_layout != "NHD",
        }
        parts = (self.dtype, *(text for text, shown in besides.items() if shown))
        return f"{self.num_qo_heads}:{self.num_kv_heads} heads, head_dim {self.head_dim}{of_v}, {', '.join(parts)}"


DEFAULT_SHAPE = Shape(32, 8, 128, dtype="bf16")
"""The assumption where no shape is known yet; its users say that they assume it."""
