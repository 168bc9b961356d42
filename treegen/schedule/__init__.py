"""Lowering: turns a plan into a schedule, and rewrites schedules before they are launched.

    Plan ──▶ arrangement ──▶ segment_runs ──▶ pack_runs ──▶ row_results ──▶ Schedule ──▶ passes
             work items       KV runs          tiles         partial slots,
             in launch order  of each item                   merge lists

`lower` does these steps for trees by KV slot. `by_request`, `query_runs` and `chunk_items` do them for trees by
request: their schedules name tokens of requests, and a step kernel on the device (or `expand` on the host) looks up the
KV slots in every step.
"""
