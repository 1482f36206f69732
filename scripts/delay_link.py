#!/usr/bin/env python3
"""A link with a delay between two network namespaces, for kernels without netem: NAMESPACE-A NAMESPACE-B DEVICE SECONDS

Makes a TUN device in each namespace and carries packets between them, each so many seconds after it came. Prints "ready"
when both are there, and runs until it is ended. Packets are up to 64 kB, so that a gigabit is some thousand a second.
"""
import collections
import ctypes
import fcntl
import os
import select
import struct
import time

import usage

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
WAITING = 1000  # packets on their way, at most: then the sender's queue fills


def tun(namespace, device):
    with open(f"/var/run/netns/{namespace}") as f:
        if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter network namespace {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def carry(a, b, delay):
    other, queue = {a: b, b: a}, {a: collections.deque(), b: collections.deque()}
    while True:
        heads = [q[0][0] for q in queue.values() if q]
        wait = max(0.0, min(heads) - time.monotonic()) if heads else None
        ready, _, _ = select.select([fd for fd in queue if len(queue[fd]) < WAITING], [], [], wait)
        for fd in ready:
            try:
                queue[fd].append((time.monotonic() + delay, os.read(fd, 65536)))
            except BlockingIOError:
                pass
        now = time.monotonic()
        for fd, q in queue.items():
            while q and q[0][0] <= now:
                try:
                    os.write(other[fd], q.popleft()[1])
                except OSError:  # the device is down: a lost packet
                    pass


def main(first, second, device, seconds):
    a, b = tun(first, device), tun(second, device)
    print("ready", flush=True)
    try:
        carry(a, b, float(seconds))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main(*usage.arguments("NAMESPACE-A NAMESPACE-B DEVICE SECONDS"))
