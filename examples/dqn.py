"""A deep Q-network (Mnih et al. 2015) finds its way through a gridworld with walls.

    python examples/dqn.py [--target llvm|cuda] [--steps 2000]

The agent sees the grid as an image of three planes (itself, the goal, walls) and learns what each of four moves is
worth: the reward, and the best that follows by an older copy of the network. The copy is a `state_dict`, whose values
stay as they were. Moves are chosen on the host and learnt from on the target.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

SIZE, BATCH, MEMORY, DISCOUNT, LONGEST = 5, 64, 4000, 0.95, 30
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
WALLS = ((1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 4))
FREE = [(r, c) for r in range(SIZE) for c in range(SIZE) if (r, c) not in WALLS]


class World:
    """An agent and a goal on a grid. A move costs 0.05, the goal gives 1 and ends the episode."""

    def __init__(self, rng: np.random.Generator) -> None:
        first, goal = rng.choice(len(FREE), 2, replace=False)
        self.place, self.goal, self.moves = FREE[first], FREE[goal], 0

    def seen(self) -> np.ndarray:
        planes = np.zeros((3, SIZE, SIZE), np.float32)
        planes[0][self.place] = planes[1][self.goal] = 1
        for wall in WALLS:
            planes[2][wall] = 1
        return planes

    def move(self, action: int) -> tuple[float, bool]:
        """Reward, and whether the goal is reached."""
        to = (self.place[0] + MOVES[action][0], self.place[1] + MOVES[action][1])
        self.place = to if to in FREE else self.place
        self.moves += 1
        return (1.0, True) if self.place == self.goal else (-0.05, False)


def model(width: int = 128) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * SIZE**2, width), nn.ReLU(), nn.Linear(width, len(MOVES)),
    )  # fmt: skip


def loss_of(net: Any, seen: Any, action: Any, worth: Any) -> Any:
    """How far the values of the chosen moves are from what they turned out to be worth."""
    return F.smooth_l1_loss(xp.take_along_axis(net(seen), action[:, None], axis=1)[:, 0], worth)


def reached(net: Any, rng: np.random.Generator, episodes: int) -> float:
    """The share of episodes in which the best moves lead to the goal."""
    worlds = [World(rng) for _ in range(episodes)]
    done = np.zeros(episodes, bool)
    for _ in range(LONGEST):
        best = net(np.stack([w.seen() for w in worlds])).numpy().argmax(1)
        for k in np.flatnonzero(~done):
            done[k] = worlds[k].move(int(best[k]))[1]
    return float(done.mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A deep Q-network in a gridworld.")
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(argv)
    dnnc.random.seed(0)
    rng = np.random.default_rng(0)
    net, older = model(), model().eval()
    step = dnnc.train_step(loss_of, optim.Adam(lr=2e-3), net, target=args.target)
    memory: list[tuple[np.ndarray, int, float, bool, np.ndarray]] = []
    world = World(rng)
    for k in (bar := dnnc.progress(range(args.steps))):
        if k % 50 == 0:  # the copy acts as well: it is on the host
            older.load_state_dict({n: a.to_device("cpu") for n, a in net.state_dict().items()})
        for _ in range(4):
            seen = world.seen()
            guess = rng.random() < max(0.1, 1 - 2 * k / args.steps)
            action = int(rng.integers(4)) if guess else int(older(seen[None]).numpy().argmax())
            reward, done = world.move(action)
            memory = [*memory[-MEMORY:], (seen, action, reward, done, world.seen())]
            if done or world.moves == LONGEST:
                world = World(rng)
        drawn = (memory[i] for i in rng.integers(0, len(memory), BATCH))
        seen, action, reward, done, after = (np.stack(a) for a in zip(*drawn))
        best = older(after).numpy().max(1)
        bar.tell(loss=step(seen, action, (reward + DISCOUNT * best * ~done).astype(np.float32)))

    older.load_state_dict({n: a.to_device("cpu") for n, a in net.state_dict().items()})
    print(f"the goal is reached in {reached(older, rng, 100):.0%} of 100 episodes")


if __name__ == "__main__":
    main()
