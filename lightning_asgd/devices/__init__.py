"""Copies between device and host memory.

``devices/device_staging.py`` stands between host memory and a module on a device with streams (``lane_for``). Packing
and merging are queued on a stream of their own, after what training queued before and before what it queues later.
``base`` is on the device, or with ``Advanced(offload=True)`` in pinned memory, from which passes take spans
(``Replica._staged``). Algorithms that push gradients are refused with ``Advanced(offload=True)``, because their sums
stay on the device.

Nothing is sent before the device has finished the copy: a server replies into memory that the device may still read.
The worker checks after every step and sends what is due (``Channel.leaving``).

``tests/component/test_any_delay.py`` simulates a device whose queues have any delay. The results must have a CPU's
bits, but not once a wait or an event of ``device_staging.py`` is removed.
"""
