"""Which process hosts the servers, and servers that one process lends another.

If worker 0's process or machine is lost on several machines, or under torchrun, SLURM or Kubernetes, another worker can
host the servers (``core/job/address.py``). A worker that looks for a replacement, or whose heartbeats were not
answered for 20 s, checks whether worker 0's process listens (``hosting/server_hosts.py``). If not, it votes at the
lowest rank that answers, which starts servers with the votes of more than half of the workers that may live. On worker
0's side the coordinator ends the session if more than half are silent, for as long as these may vote elsewhere
(``Policy.elsewhere_s``). So two workers do not host servers at once. Joins name the chief (``Policy.chief``), because a
new coordinator would take worker 0 for it.

Servers on several nodes (``Advanced(server_machines=...)``, ``hosting/placed_servers.py``) have a lease as lent servers
do (see below), of ten seconds, because the process that renews it also trains.

Processes of ``serve`` on several machines are the *hosts* of one run (``serve --join``). Each has a rendezvous, a
gateway and all servers. The *present host* has announced its servers; those of a standby host wait in the phase
``LOST``, so a takeover starts no process.

Each host publishes a ``HostEntry``: its term, its present host, all hosts, and the workers that elect the next one. A
worker that loses its servers asks all hosts and follows a serving host with a higher term. If there is none, it votes
(``RunFinder``). A candidate needs the votes of more than half of the workers on the present host's list (``RunHost``).
Every takeover raises the term. A worker follows no lower term unless all other hosts have ended, so a host that is
started afresh is not taken for the run.

Two hosts must not serve at once:

- The present host may serve for its lease (``serve --lease-s``, 2.5 s) after a moment for which every standby host has
  answered that it does not campaign, or more than half of the workers were heard. After the lease it kills its servers.
- It changes the list of workers only when all standby hosts know it as present, so that two majorities share a worker.
- A candidate that does not reach it publishes that it campaigns, and waits for the lease and a margin. It does not wait
  if the present host's process has ended or says that it does not serve.
- A standby host that is off the present host's list, or has not seen it for 60 s, may not take over.

All these times are parts of the lease, which hosts and workers read in the first host's entry.

With ``serve --machines`` standby hosts *lend* servers (``hosting/lent_servers.py``). Lent servers live for the lease
after the lender last learned that the borrower serves. Then they end by themselves, even while the lender is suspended.
A host that takes over announces its own servers only, because a lender's cannot tell which host the workers follow.
"""
