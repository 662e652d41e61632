"""Starts, watches and ends the processes of a job, and says where they meet.

With ``start_method="fork"``, ``"spawn"`` or ``"forkserver"`` worker 0 is a child. The main process only waits, takes
the chief's results, or raises the last worker's error.

The *supervisor*, a thread of the main process, notices when a server or worker ends. The *reaper* outlives the main
process by seconds. However the main process ended, the reaper gives the other processes 3.5 s to end, then sends
SIGTERM, then kills them.

The *rendezvous* is a key-value store with the servers' addresses and start-up errors. With ``transport="zmq"`` the main
process keeps the entries behind an authenticated socket (``transports/zmq/store.py``). With ``"rpc"`` they lie in
torch's ``TCPStore``, each with an authentication code. A store that torchrun's agent, or DDP at
``MASTER_ADDR:MASTER_PORT``, already hosts is the rendezvous for both transports. DDP cannot share the socket of
``"zmq"``, so the main process closes that before DDP creates its process group (``core/job/address.py``).

``transport="auto"`` depends only on what all machines of a job share, the secret and the installed libraries, so they
agree without a message. Servers and connections are kept for the next call of a Trainer, and for the next Trainer of
the process: starting a server takes as long as importing torch.
"""
