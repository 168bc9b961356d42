"""The target that most tests plan for."""

from treegen.target.targets import target_from

H200 = target_from("h200")
