"""An entry of the policy cache."""

from treegen import Shape, Tree
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import key_for
from treegen.search.bucket import policy_bucket
from treegen.target.targets import target_from

TREE = "1,4/100,10"
SHAPE = Shape(16, 2, 64, dtype="fp16", page_size=16)
KEY = key_for(policy_bucket(Tree.parse(TREE)), SHAPE, target_from("a100"))
ENTRY = Entry(
    KEY, {"strategy": "cohort", "head_rows": 16, "tile": [16, 64]}, 12.5, (("query", 20.0, "ok"),), "a100, a test"
)
