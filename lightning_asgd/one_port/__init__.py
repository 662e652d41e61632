"""One port for a job: the gateway.

With ``transport="zmq"`` a job on several machines, and an elastic run, has one port. The servers listen on loopback,
and the *gateway* (``one_port/gateway.py``) passes connections on to them. A worker on a server's machine connects
directly. Others connect to the address at which they found the rendezvous, so NAT and tunnels need no settings.
Connections stay encrypted from worker to server.
"""
