"""How many cores torch uses in one thread, without changing it for the others.

``torch.set_num_threads`` does two things: it sets the OpenMP and MKL limit of the
*calling* thread, and it replaces the default that threads take which have not
used torch yet. Threads that already have a limit keep it. So a worker that wants
its own limit sets it once at its start and puts the default back, from a thread
that ends right away; the trainer's thread never notices. (Measured on torch 2.13.)
"""

from __future__ import annotations

import os
import threading

import torch


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_this_thread(threads: int) -> None:
    """Let torch use ``threads`` cores in the calling thread; the default of later threads stays."""
    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    restore = threading.Thread(target=torch.set_num_threads, args=(default,), name="palestra-threads")
    restore.start()
    restore.join()
