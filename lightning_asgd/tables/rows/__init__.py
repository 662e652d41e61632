"""Tables of which only changed rows are exchanged.

Of a table with ``sparse=True`` only changed rows are exchanged, both ways (``protocol.Rows``), or the whole table when
that takes less. A hook notes the rows of gradients (``tables/rows/worker.py``). Momentum or ``max_norm`` may move other
rows, so every push also compares a 64th of the table with its base, and the last push before a sync point all of it.

The server notes when each row changed (``tables/rows/server.py``) and answers the rows that changed since the worker's
latest reply, which it recognises by a name. A server that was replaced or restored has another name and answers all
rows. The reply includes every row of the push, even of a rejected one, because the worker has moved its base. A pushed
row that is missing did not arrive, and the worker restores its base.

An algorithm handles the pushed rows (``Algorithm.apply_rows``) if it keeps nothing and leaves a weight with a zero
update as it is (``Algorithm.by_rows``). Other algorithms, and islands, exchange tables as any parameter.
"""
