"""The language of treegen: trees, plans and schedules. No torch, no Triton, no input or output.

Glossary
    node      a run of tokens; its children extend it. A tree may be a forest; a node may have no tokens.
    row       a query attached to a node: it sees all tokens of the node's ancestors and `sees` of its own.
    slot      a token's place in the KV cache; a run is consecutive slots (KVRuns).
    rank      a row's number in depth-first preorder, within a node by `sees`. The rows that see a token are one
              interval of ranks, so a mask is never more than two integers per run of tokens.
    span      a maximal run of one node's tokens that the same rows see.
    group     rows (ascending rank intervals) that read the same segments together.
    segment   a run of one node's tokens that a group reads, and the interval of the group's rows that see it.
    plan      groups. The law: every visible (row, token) pair is seen in exactly one group, no invisible pair is seen.
    item      the part of a group that one thread block works on, per KV head.
    partial   an item's result for a row that other items work on too; it goes to a slot of the partial buffer.
    stage     a round of launches, merged before the next one begins; most schedules have one.
    merge     how rows of several items get their results: "reduce" by kernels of their own, "final" in the epilogue.
    epilogue  what an item of the last stage does before it writes: it joins its rows' partials of earlier stages.
    schedule  items in launch order, the KV tiles they walk, and per row the partials to merge, there or by a kernel.
    arena     a schedule as one array.

Modules, in the order of the flow: errors, arrays, tree (a folder: kv, topology, build, page_tables, edits, queries,
custom_masks, tree_text, tree_json, signature, tree), shape, keys, plan, arena, schedule, verify.
"""
