"""The prefix cache again, as plainly as it can be written: whole prefixes as names, lists as queues, no hashes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cache.block_hash import HashScheme, extra_keys
from cache.eviction import PROTECTED_SHARE
from cache.retention import Retention, RetentionBudget

Prefix: TypeAlias = tuple[str | None, tuple[int, ...]]


@dataclass
class Mark:
    depth: int
    ttl_s: float
    until_s: float
    priority: int
    tenant: str


@dataclass
class Request:
    salt: str | None
    tokens: list[int]
    table: list[int]
    num_committed: int
    num_prompt_blocks: int
    num_computed: int
    retention: Sequence[Retention]
    tenant: str


@dataclass
class NaiveCache:
    num_blocks: int
    scheme: HashScheme
    policy: str = "lru"
    reuse_min: int | None = None
    budget: RetentionBudget = field(default_factory=lambda: RetentionBudget(0, 0))
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        self.size = self.scheme.block_size
        self.now = float("-inf")
        self.queues: dict[int, list[int]] = {0: list(range(1, self.num_blocks))}
        self.users = [0] * self.num_blocks
        self.was_hit: set[int] = set()
        self.copies: dict[Prefix, list[int]] = {}
        self.fronts: list[tuple[int, Prefix, tuple[int, ...]]] = []  # block, parent, tokens; oldest first
        self.partials: set[int] = set()
        self.marks: dict[Prefix, Mark] = {}
        self.running: dict[object, Request] = {}
        self.doubles = list(range(1, self.num_host_blocks + 1))  # of the host tier: empty, or on the device too
        self.alone: list[int] = []
        self.in_host: dict[Prefix, int] = {}
        self.moves: list[tuple[str, int, int, int]] = []  # what is to be copied: where to, source, target, tokens

    def prefix(self, salt: str | None, tokens: Sequence[int], depth: int) -> Prefix:
        return salt, tuple(tokens[: depth * self.size])

    def num_hits(self, salt: str | None, tokens: Sequence[int]) -> int:
        depth = self.num_device_hits(salt, tokens)
        while (depth + 1) * self.size < len(tokens) and self.prefix(salt, tokens, depth + 1) in self.in_host:
            depth += 1
        return depth

    def num_device_hits(self, salt: str | None, tokens: Sequence[int]) -> int:
        depth = 0
        while (depth + 1) * self.size < len(tokens) and self.prefix(salt, tokens, depth + 1) in self.copies:
            depth += 1
        return depth

    def pending(self, salt: str | None, tokens: Sequence[int]) -> int:
        start = depth = self.num_hits(salt, tokens)
        coming = {
            self.prefix(other.salt, other.tokens, end)
            for other in self.running.values()
            for end in range(other.num_committed + 1, other.num_prompt_blocks + 1)
        }
        while (depth + 1) * self.size < len(tokens) and self.prefix(salt, tokens, depth + 1) in coming:
            depth += 1
        return (depth - start) * self.size

    def order(self) -> list[int]:
        return [block for queue_class in sorted(self.queues) for block in self.queues[queue_class]]

    def admit(
        self,
        name: object,
        salt: str | None,
        tokens: Sequence[int],
        now: float,
        retention: Sequence[Retention] = (),
        tenant: str = "",
    ) -> tuple[int, list[int], int] | None:
        num_hit, num_on_device = self.num_hits(salt, tokens), self.num_device_hits(salt, tokens)
        hits = [self.copies[self.prefix(salt, tokens, depth + 1)][0] for depth in range(num_on_device)]
        returning = [self.prefix(salt, tokens, depth + 1) for depth in range(num_on_device, num_hit)]
        num_new = -(-len(tokens) // self.size) - num_on_device
        num_left = len(self.order()) - sum(not self.users[block] for block in hits) - num_new
        if num_left < 0:
            return None
        self.pass_time(now)
        source, num_copied = self.best_front(salt, tokens, num_hit, num_left)
        for block in hits:
            self.use(block)
            self.was_hit.add(block)
        if num_copied:
            self.use(source)
        for prefix in returning:
            self.alone.remove(self.in_host[prefix])
        table = hits + self.take(num_new)
        if num_copied:
            self.moves.append(("device", source, table[num_hit], num_copied))
            self.users[source] -= 1
            if not self.users[source]:
                self.queue_kept([source])
        for depth, prefix in enumerate(returning, num_on_device):
            self.moves.append(("back", self.in_host[prefix], table[depth], self.size))
            self.doubles.append(self.in_host[prefix])
            self.copies[prefix] = [table[depth]]
            self.was_hit.add(table[depth])
            if self.reuse_min is not None:
                block_tokens = tuple(tokens[depth * self.size : (depth + 1) * self.size])
                self.fronts.append((table[depth], self.prefix(salt, tokens, depth), block_tokens))
        for depth in range(num_hit):
            mark = self.marks.get(self.prefix(salt, tokens, depth + 1))
            if mark is None:
                break
            mark.until_s = max(mark.until_s, self.now + mark.ttl_s)
        num_cached = num_hit * self.size + num_copied
        request = Request(
            salt, list(tokens), table, num_hit, len(tokens) // self.size, num_cached, tuple(retention), tenant
        )
        self.running[name] = request
        self.mark(request, range(num_hit))
        return num_cached, table, len(returning) * self.size

    def append(self, name: object, tokens: Sequence[int], now: float) -> bool:
        request = self.running[name]
        num_new = -(-(len(request.tokens) + len(tokens)) // self.size) - len(request.table)
        if num_new > len(self.order()):
            return False
        request.tokens += tokens
        if num_new > 0:
            self.pass_time(now)
            request.table += self.take(num_new)
        return True

    def renew(self, salt: str | None, tokens: Sequence[int], now: float) -> None:
        num_on_device = self.num_device_hits(salt, tokens)
        hits = [self.copies[self.prefix(salt, tokens, depth)][0] for depth in range(num_on_device, 0, -1)]
        self.pass_time(now)
        for depth in range(self.num_hits(salt, tokens), num_on_device, -1):
            block = self.in_host[self.prefix(salt, tokens, depth)]
            self.alone.remove(block)
            self.alone.append(block)
        idle = [block for block in hits if not self.users[block]]
        for queue in self.queues.values():
            queue[:] = [block for block in queue if block not in idle]
        self.queue_kept(idle)

    def commit(self, name: object, num_computed: int) -> None:
        request = self.running[name]
        request.num_computed = max(request.num_computed, num_computed)
        start, end = request.num_committed, max(request.num_committed, num_computed // self.size)
        for depth in range(start, end):
            block = request.table[depth]
            copies = self.copies.setdefault(self.prefix(request.salt, request.tokens, depth + 1), [])
            copies.append(block)
            if len(copies) == 1 and self.reuse_min is not None:
                tokens = tuple(request.tokens[depth * self.size : (depth + 1) * self.size])
                self.fronts.append((block, self.prefix(request.salt, request.tokens, depth), tokens))
        for depth in range(start, end):
            double = self.in_host.get(self.prefix(request.salt, request.tokens, depth + 1))
            if double is not None:
                (self.alone if double in self.alone else self.doubles).remove(double)
                self.doubles.append(double)
        request.num_committed = end
        if start < min(end, request.num_prompt_blocks):
            self.mark(request, range(min(end, request.num_prompt_blocks)))

    def free(self, name: object, now: float, recompute: bool) -> None:
        request = self.running.pop(name)
        self.pass_time(now)
        partial = None if recompute else self.keep_partial(request)
        held = {block for copies in self.copies.values() for block in copies} | {partial}
        idle = []
        for block in reversed(request.table):
            self.users[block] -= 1
            if not self.users[block]:
                idle.append(block)
        self.queues[0][:0] = [block for block in idle if block not in held]
        self.queue_kept([block for block in idle if block in held])

    def reset(self) -> bool:
        if self.running:
            return False
        self.queues = {0: self.order()}
        self.was_hit.clear()
        self.copies.clear()
        self.fronts.clear()
        self.partials.clear()
        self.marks.clear()
        self.doubles, self.alone = self.doubles + self.alone, []
        self.in_host.clear()
        return True

    def use(self, block: int) -> None:
        self.users[block] += 1
        for queue in self.queues.values():
            if block in queue:
                queue.remove(block)

    def take(self, count: int) -> list[int]:
        taken = self.order()[:count]
        evicted: list[tuple[Prefix, int]] = []
        for block in taken:
            self.use(block)
            self.was_hit.discard(block)
            self.partials.discard(block)
            self.fronts = [front for front in self.fronts if front[0] != block]
            for prefix, copies in list(self.copies.items()):
                if block in copies:
                    copies.remove(block)
                    if not copies:
                        del self.copies[prefix]
                        self.marks.pop(prefix, None)
                        evicted.append((prefix, block))
        self.demote(evicted)
        return taken

    def demote(self, evicted: Sequence[tuple[Prefix, int]]) -> None:
        room = len(self.doubles) + len(self.alone)
        evicted = evicted[max(0, len(evicted) - room) :]
        for prefix, _ in evicted:
            if prefix in self.in_host:
                self.doubles.remove(self.in_host[prefix])
        places = []
        for prefix, block in evicted:
            if prefix not in self.in_host:
                place = (self.doubles or self.alone).pop(0)
                self.in_host = {name: host for name, host in self.in_host.items() if host != place}
                self.moves.append(("out", block, place, self.size))
                places.append((prefix, place))
            else:
                places.append((prefix, self.in_host[prefix]))
        self.in_host.update(places)
        self.alone += [place for _, place in places]

    def queue_kept(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            marks = [
                self.marks[prefix] for prefix, copies in self.copies.items() if block in copies and prefix in self.marks
            ]
            queue_class = 2 + marks[0].priority if marks else int(self.policy == "slru" and block in self.was_hit)
            self.queues.setdefault(queue_class, []).append(block)
        protected = self.queues.get(1, [])
        while len(protected) > int(PROTECTED_SHARE * self.num_blocks):
            self.queues[0].append(protected.pop(0))

    def best_front(self, salt: str | None, tokens: Sequence[int], num_hit: int, num_left: int) -> tuple[int, int]:
        if self.reuse_min is None:
            return 0, 0
        wanted = tokens[num_hit * self.size : min((num_hit + 1) * self.size, len(tokens) - 1)]
        best = self.longest(self.prefix(salt, tokens, num_hit), wanted)
        if best[1] < self.reuse_min or not (num_left > 0 or self.users[best[0]]):
            return 0, 0
        return best

    def longest(self, parent: Prefix, wanted: Sequence[int]) -> tuple[int, int]:
        best = (0, 0)
        for block, other, tokens in reversed(self.fronts):
            count = 0
            while other == parent and count < min(len(tokens), len(wanted)) and tokens[count] == wanted[count]:
                count += 1
            if count > best[1]:
                best = (block, count)
        return best

    def keep_partial(self, request: Request) -> int | None:
        depth = request.num_committed
        tokens = tuple(request.tokens[depth * self.size : min(request.num_computed, (depth + 1) * self.size)])
        if self.reuse_min is None or not self.reuse_min <= len(tokens) < self.size:
            return None
        parent = self.prefix(request.salt, request.tokens, depth)
        if self.longest(parent, tokens)[1] == len(tokens):
            return None
        block = request.table[depth]
        self.fronts.append((block, parent, tokens))
        self.partials.add(block)
        return block

    def mark(self, request: Request, depths: range) -> None:
        for depth in depths:
            prefix = self.prefix(request.salt, request.tokens, depth + 1)
            wishes = [wish for wish in request.retention if wish.num_tokens >= (depth + 1) * self.size]
            if not wishes:
                return
            ttl_s, priority = max(wish.ttl_s for wish in wishes), max(wish.priority for wish in wishes)
            mark = self.marks.get(prefix)
            if mark is None:
                charged = sum(mark.tenant == request.tenant for mark in self.marks.values())
                if depth and self.prefix(request.salt, request.tokens, depth) not in self.marks:
                    return
                if len(self.marks) >= self.budget.max_blocks or charged >= self.budget.max_blocks_per_tenant:
                    return
                mark = self.marks[prefix] = Mark(depth, ttl_s, self.now + ttl_s, priority, request.tenant)
            mark.priority = max(mark.priority, priority)
            mark.ttl_s = max(mark.ttl_s, ttl_s)
            mark.until_s = max(mark.until_s, self.now + mark.ttl_s)

    def pass_time(self, now: float) -> None:
        self.now = max(self.now, now)
        over = [(mark.until_s, -mark.depth, self.hash_of(prefix), prefix) for prefix, mark in self.marks.items()]
        moved = []
        for until_s, _, _, prefix in sorted(over, key=lambda entry: entry[:3]):
            if until_s <= self.now:
                del self.marks[prefix]
                for block in self.copies[prefix]:
                    for queue_class, queue in self.queues.items():
                        if queue_class >= 2 and block in queue:
                            queue.remove(block)
                            moved.append(block)
        self.queue_kept(moved)

    def hash_of(self, prefix: Prefix) -> bytes:
        salt, tokens = prefix
        return self.scheme.block_hashes(tokens, extra_keys(len(tokens), self.size, cache_salt=salt))[-1]
