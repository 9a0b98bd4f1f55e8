"""Six STS3215 servos on a pseudo-terminal, which answer Feetech's protocol byte by byte.

Written from the protocol's manual: a packet is FF FF id length instruction parameters checksum; the checksum is the
inverted sum of all bytes after FF FF; a servo answers FF FF id length error data checksum. With torque a servo goes
to its goal, by `share` of the way from one question for all positions to the next.
"""

import os
import select
import threading
import tty
from collections.abc import Callable

PING, READ, WRITE, SYNC_READ, SYNC_WRITE, ALL = 1, 2, 3, 0x82, 0x83, 0xFE
TORQUE, GOAL, PRESENT = 40, 42, 56


def packet(number: int, body: bytes) -> bytes:
    inner = bytes([number, len(body) + 1]) + body
    return b"\xff\xff" + inner + bytes([~sum(inner) & 0xFF])


class ServoBus:
    """`port` is the name to open. `memory[id]` are the registers. `drop(instruction, id)` says whether an answer is
    lost; `log` has (instruction, id, address, data) of all writes. One question is answered from one position of the
    arm: `set_positions` waits meanwhile."""

    def __init__(self, registers: dict[int, dict[int, int]], present: dict[int, int]):
        """`registers`: by id and address, words of two bytes; `present`: ticks by id."""
        self.memory = {number: bytearray(128) for number in registers}
        for number, words in registers.items():
            for address, word in {**words, GOAL: 0, PRESENT: present[number]}.items():
                self.memory[number][address : address + 2] = word.to_bytes(2, "little")
        self.share = 1.0
        self.log: list[tuple[int, int, int, bytes]] = []
        self._still = threading.Lock()
        self.drop: Callable[[int, int], bool] = lambda instruction, number: False
        self._mine, self._theirs = os.openpty()
        tty.setraw(self._theirs)
        self.port = os.ttyname(self._theirs)
        self._stop, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self):
        os.close(self._ended)
        self._thread.join()
        for descriptor in (self._stop, self._mine, self._theirs):
            os.close(descriptor)

    def word(self, number: int, address: int) -> int:
        return int.from_bytes(self.memory[number][address : address + 2], "little")

    def set_word(self, number: int, address: int, word: int) -> None:
        self.memory[number][address : address + 2] = word.to_bytes(2, "little")

    def set_positions(self, ticks: dict[int, int]) -> None:
        """Move the servos of these ids by hand, all at once."""
        with self._still:
            for number, tick in ticks.items():
                self.set_word(number, PRESENT, tick)

    @property
    def torques(self) -> list[int]:
        return [self.memory[number][TORQUE] for number in sorted(self.memory)]

    def _serve(self) -> None:
        waiting = b""
        while True:
            ready, _, _ = select.select([self._mine, self._stop], [], [])
            if self._stop in ready:
                return
            waiting += os.read(self._mine, 4096)
            while (begin := waiting.find(b"\xff\xff")) >= 0 and len(waiting) >= begin + 4:
                size = 4 + waiting[begin + 3]
                if len(waiting) < begin + size:
                    break
                one, waiting = waiting[begin : begin + size], waiting[begin + size :]
                assert packet(one[2], one[4:-1]) == one, f"no packet: {one.hex()}"
                with self._still:
                    self._answer(one[2], one[4], one[5:-1])

    def _answer(self, number: int, instruction: int, data: bytes) -> None:
        if instruction == SYNC_READ:
            for each in data[2:]:
                self._move(each)
                self._reply(each, instruction, self.memory[each][data[0] : data[0] + data[1]])
        elif instruction == SYNC_WRITE:
            for first in range(2, len(data), 1 + data[1]):
                self._write(data[first], instruction, data[0], data[first + 1 : first + 1 + data[1]])
        elif number in self.memory:
            if instruction == READ:
                self._reply(number, instruction, self.memory[number][data[0] : data[0] + data[1]])
            elif instruction == WRITE:
                self._write(number, instruction, data[0], data[1:])
                self._reply(number, instruction, b"")

    def _reply(self, number: int, instruction: int, data: bytes) -> None:
        if not self.drop(instruction, number):
            os.write(self._mine, packet(number, b"\x00" + bytes(data)))

    def _write(self, number: int, instruction: int, address: int, data: bytes) -> None:
        memory = self.memory[number]
        memory[address : address + len(data)] = data
        self.log.append((instruction, number, address, bytes(data)))

    def _move(self, number: int) -> None:
        goal, present = self.word(number, GOAL), self.word(number, PRESENT)
        if self.memory[number][TORQUE]:
            self.set_word(number, PRESENT, present + round(self.share * (goal - present)))
