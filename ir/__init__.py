"""The language of treegen: trees, plans and schedules. No torch, no Triton, no input or output.

Glossary
    node          a run of tokens; its children extend it. A tree may be a forest, and a node may have no tokens.
    row           a query that is attached to a node: it sees all tokens of the node's ancestors, and the first `sees`
                  tokens of the node.
    KV slot       a token's place in the KV cache. A run is a number of neighbouring slots (KVRuns).
    rank          a row's number in depth-first preorder, within a node by `sees`. The rows that see a token are one
                  interval of ranks, so a mask takes two integers per run of tokens.
    span          a maximal run of one node's tokens that the same rows see.
    group         rows, as ascending intervals of ranks, that read the same segments together.
    segment       a run of one node's tokens that a group reads, and the interval of the group's rows that see it.
    plan          a list of groups. It obeys the coverage law: a row sees each token of its path in exactly one group,
                  and no other token.
    round         launches of a plan that are merged before the next launches begin; most schedules have one round.
    item          the part of a group that one thread block works on, for one KV head.
    tile          the tokens that a thread block loads at a time: one run (a full tile), or several packed runs.
    packed run    a short run of tokens, which shares a tile with others.
    partial       an item's result for a row that other items work on, too; it goes to a partial slot.
    partial slot  a partial's place in the partial buffer.
    merge         joins the partials of a row: "reduce" in merge kernels, "final" in epilogues of the last round.
    epilogue      what an item of the last round does before it writes: it joins its rows' partials.
    schedule      items in launch order, the tiles that they read, and the lists of partials to merge.
    arena         a schedule as one int32 array.

Grammar
    Tree     = {parent, tokens} of nodes, {node, sees} of rows, KVRuns | RequestKV
    Plan     = strategy, {Group}, [tiles], mask, merge, thread blocks
    Group    = {lo:hi} of ranks, {Segment}, round
    Segment  = node, start:stop of its tokens, lo:hi of the group's rows
    Schedule = {KernelConfig}, {WorkItem}, row table, tiles, packed runs, merge lists, rounds
    WorkItem = rows, full tiles, packed tiles, [partial slots]
"""
