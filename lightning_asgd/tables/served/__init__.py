"""Tables that lie on the servers, in files.

The table of a ``ServedEmbedding`` lies on the servers only, row ``r`` on server ``r % n`` of ``n``, in files
(``tables/served/row_files.py``), and takes no part in exchanges. A forward pass fetches the rows that are not in the
worker's cache (``FetchRows``). At the optimizer's step gradients go to the servers (``PushRows``), whose own optimizer
changes the rows. The worker waits for the reply before it reads rows again, so one worker trains as with a local table.

A server writes a push to a journal, changes the mapped rows, and replies. A replacement applies the latest push again
from the journal; a push whose number is known changes nothing.

First values follow from a seed and the row's number, so untrained rows are never written. Disk space is reserved,
because a write to a mapped hole on a full disk would kill the process. Messages about tables have a thread of their
own, outside of the service's lock (``tables/served/server.py``), so that long copies delay no heartbeat.
"""
