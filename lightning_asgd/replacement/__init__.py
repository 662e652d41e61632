"""Workers that are replaced, another chief, and the last checkpoint.

Another chief. A chief that took no part in a collective is gone, and the lowest rank that did is the next
(``protocol.next_chief``). All workers get the same results, so all have the same chief. A broadcast of a lost chief
fails on all alike, and they repeat it with the next (``Collectives.broadcast_of_chief``). Once the chief has left
between two sync points, heartbeat replies name the lowest living rank, which takes over before its next batch. It
adopts what the earlier chief has published (``replacement/chief.py``). Ranks stay: ``is_global_zero`` and
``rank_zero_only`` move, ``global_rank`` does not.

A last checkpoint. Servers whose parent was killed end the session and answer for 3.5 more seconds. The worker that asks
first fetches the weights, adds its steps and writes the file (``replacement/last_checkpoint.py``). Servers cannot: they
know neither the module's names nor the loops' progress.

A process that is started again replaces a worker (``replacement/late_entry.py``) that has left, is suspected or is
known to be dead (``RankHeld``). The server keeps the number of the old one's latest push. The new process sets itself
up from what worker 0 publishes after every sync point (``EntryPoint``), and its collectives are local meanwhile
(``Phase.ENTERING``). At its first batch a second ``Join`` makes it a member.
"""
