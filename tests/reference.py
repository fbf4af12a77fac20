"""The estimators again, in plain dictionaries and loops: slow, obvious, written from the specification alone.

A row is a dict with group, trajectory, turn, ret, score, action, observation, cluster, state, ngram. Every estimator
and option of `openrlhf_bipace.advantages` must equal this. Nothing of the package is used here, and sums go over the
raw values, so that a fault in the package's arithmetic cannot hide in both.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict

FLAT, EPS = 1e-8, 1e-6
PAIRINGS = {
    "gigpo": ("observation", "v"),
    "pace_q": ("observation", "q"),
    "pace_diff": ("observation", "diff"),
    "bigpo": ("hidden", "v"),
    "bipace_q": ("hidden", "q"),
    "bipace_diff": ("hidden", "diff"),
    "bipace_eb": ("hidden", "eb"),
    "bipace_hgpo": ("hidden", "nested"),
}


def mean(values):
    return sum(values) / len(values)


def std(values, unbiased=True):
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - unbiased))


def flat(values):
    return max(values) - min(values) <= FLAT


def members(rows, key):
    """key(row) -> indices of its rows."""
    out = defaultdict(list)
    for i, row in enumerate(rows):
        out[key(row)].append(i)
    return out


# Returns and the episode part ------------------------------------------------------------------------------------


def discounted(rewards, gamma):
    """Returns of one trajectory's rewards in time order."""
    out, following = [], 0.0
    for r in reversed(rewards):
        following = r + gamma * following
        out.append(following)
    return out[::-1]


def episode(rows, config):
    out = [0.0] * len(rows)
    for indices in members(rows, lambda r: r["group"]).values():
        scores = [rows[i]["score"] for i in indices]
        length = Counter(rows[i]["trajectory"] for i in indices)
        if len(length) == 1 or flat(scores):
            continue
        if config.episode_weighting == "step":
            m, spread = mean(scores), std(scores)
        else:
            weights = [1.0 / length[rows[i]["trajectory"]] for i in indices]
            m = sum(w * s for w, s in zip(weights, scores, strict=True)) / len(length)
            squares = sum(w * (s - m) ** 2 for w, s in zip(weights, scores, strict=True))
            spread = math.sqrt(squares / (len(length) - 1))
        for i, s in zip(indices, scores, strict=True):
            out[i] = (s - m) / (spread + EPS) if config.episode_mode == "mean_std" else s - m
    return out


# Baselines inside one part: (returns, action keys) of at least two rows -> [(value, branch name)] ------------------


def leave_one_out(ret, i):
    return ret[i] - (sum(ret) - ret[i]) / (len(ret) - 1)


def baseline_v(ret, keys, config):
    v = mean(ret)
    return [(r - v, "NONE") for r in ret]


def baseline_diff(ret, keys, config):
    different = {}  # key -> mean return of the members with another key
    for key in set(keys):
        others = [r for r, k in zip(ret, keys, strict=True) if k != key]
        different[key] = mean(others) if others else None
    if len(different) == 1:
        return [(leave_one_out(ret, i), "FALLBACK") for i in range(len(ret))]
    return [(r - different[k], "PACE") for r, k in zip(ret, keys, strict=True)]


def baseline_q(ret, keys, config):
    by_key = defaultdict(list)
    for r, k in zip(ret, keys, strict=True):
        by_key[k].append(r)
    if len(by_key) == 1:
        if config.single_key == "rloo":
            return [(leave_one_out(ret, i), "FALLBACK") for i in range(len(ret))]
        return [(0.0, "PACE")] * len(ret)
    v, out = mean(ret), []
    for i, (r, k) in enumerate(zip(ret, keys, strict=True)):
        same = by_key[k]
        n = len(same)
        if n == 1:
            value = {"rloo": leave_one_out(ret, i), "zero": 0.0, "q": (r - v) / (1 + config.shrink)}[config.fallback]
            out.append((value, "FALLBACK"))
            continue
        q = (sum(same) - r) / (n - 1) if config.peers == "exclusive" else mean(same)
        out.append(((q - v) * n / (n + config.shrink), "PACE"))
    return out


BASELINES = {"v": baseline_v, "q": baseline_q, "diff": baseline_diff}


# The step part ---------------------------------------------------------------------------------------------------


def parts_of(rows, partition):
    if partition == "one":
        return members(rows, lambda r: r["group"])
    field = "cluster" if partition == "hidden" else partition
    return members(rows, lambda r: (r["group"], r[field]))


def step_part(rows, partition, baseline, config):
    out, branch = [0.0] * len(rows), ["SINGLETON"] * len(rows)
    for indices in parts_of(rows, partition).values():
        if len(indices) == 1:
            continue
        ret = [rows[i]["ret"] for i in indices]
        equal = flat(ret)
        if equal:
            ret = [0.0] * len(ret)
        scale = std(ret) + EPS if config.step_std and not equal else 1.0
        found = BASELINES[baseline](ret, [rows[i]["action"] for i in indices], config)
        for i, (value, name) in zip(indices, found, strict=True):
            out[i], branch[i] = value / scale, name
    return out, branch


def histories(rows):
    """Of each row: its trajectory's observations up to and including its own."""
    out = [None] * len(rows)
    for indices in members(rows, lambda r: (r["group"], r["trajectory"])).values():
        indices.sort(key=lambda i: rows[i]["turn"])
        past = tuple(rows[i]["observation"] for i in indices)
        for t, i in enumerate(indices):
            out[i] = past[: t + 1]
    return out


def hgpo(rows, config):
    past = histories(rows)
    total, weight = [0.0] * len(rows), [0.0] * len(rows)
    for k in range(1, config.hgpo_k + 2):
        w, parts = (k + 1) ** config.hgpo_alpha, defaultdict(list)
        for i, row in enumerate(rows):
            if len(past[i]) >= k:
                parts[row["group"], past[i][-k:]].append(i)
        for indices in parts.values():
            if len(indices) == 1:
                continue
            ret = [rows[i]["ret"] for i in indices]
            m, equal = mean(ret), flat(ret)
            scale = std(ret, unbiased=False) + EPS if config.step_std and not equal else 1.0
            for i, r in zip(indices, ret, strict=True):
                total[i] += 0.0 if equal else w * (r - m) / scale
                weight[i] += w
    value = [t / w if w else 0.0 for t, w in zip(total, weight, strict=True)]
    return value, ["NONE" if w else "SINGLETON" for w in weight]


def levels(rows, partition):
    """Of each row: its group, part, action in the part, and that action after the same action."""
    before = [None] * len(rows)
    for indices in members(rows, lambda r: (r["group"], r["trajectory"])).values():
        indices.sort(key=lambda i: rows[i]["turn"])
        for i, j in zip(indices[:-1], indices[1:], strict=True):
            before[j] = rows[i]["action"]
    part = [None] * len(rows)
    for key, indices in parts_of(rows, partition).items():
        for i in indices:
            part[i] = key
    return [
        (r["group"], (r["group"], p), (r["group"], p, r["action"]), (r["group"], p, r["action"], b))
        for r, p, b in zip(rows, part, before, strict=True)
    ]


def noise_ratio(rows, upper, lower, ret):
    """Half the mean square difference inside a lower label, over what crossing lower labels adds to it."""
    near, far = [], []
    for i, a in enumerate(rows):
        mine, others = [], []
        for j, b in enumerate(rows):
            if (a["group"], a["trajectory"]) != (b["group"], b["trajectory"]) and upper[i] == upper[j]:
                (mine if lower[i] == lower[j] else others).append((ret[i] - ret[j]) ** 2)
        if mine and others:
            near += mine
            far += others
    between = mean(far) - mean(near) if near else 0.0
    return min(5.0, mean(near) / between) if between > 1e-9 else 5.0


def hierarchy(rows, partition, baseline, config):
    level = levels(rows, partition)
    ret = [r["ret"] for r in rows]
    for indices in members(rows, lambda r: r["group"]).values():
        if flat([ret[i] for i in indices]):
            for i in indices:
                ret[i] = 0.0
    k = [2.0] * 3
    if baseline == "eb":
        k = [noise_ratio(rows, [lv[j] for lv in level], [lv[j + 1] for lv in level], ret) for j in range(3)]
    out, branch = [], []
    for mine in level:
        same = [[r for r, other in zip(ret, level, strict=True) if other[j] == mine[j]] for j in range(4)]
        guess = [mean(same[0])]
        for j in (1, 2, 3):
            n = len(same[j])
            guess.append((k[j - 1] * guess[-1] + n * mean(same[j])) / (k[j - 1] + n))
        scale = std(same[0]) + EPS if config.step_std and any(same[0]) else 1.0
        out.append((guess[3] - guess[1]) / scale)
        branch.append("SINGLETON" if len(same[1]) == 1 else "FALLBACK" if len(same[2]) == 1 else "PACE")
    return out, branch


def estimate(name, rows, config):
    """(episode, step, total, branch names), lists of [N]."""
    ep = episode(rows, config)
    if name == "grpo":
        step, branch = [0.0] * len(rows), ["NONE"] * len(rows)
    elif name == "hgpo":
        step, branch = hgpo(rows, config)
    else:
        partition, baseline = PAIRINGS[name] if name in PAIRINGS else name.rsplit("_", 1)
        steps = hierarchy if baseline in ("eb", "nested") else step_part
        step, branch = steps(rows, partition, baseline, config)
    return ep, step, [e + config.w * s for e, s in zip(ep, step, strict=True)], branch


# Clusters --------------------------------------------------------------------------------------------------------


def unit(vector):
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector]


def clusters(vectors, rows, epsilon, centroid, order):
    """Of each row: the index of the row that seeded its cluster."""
    leader = [None] * len(rows)
    by = {"turn": ("turn", "trajectory"), "trajectory": ("trajectory", "turn")}[order]
    for indices in members(rows, lambda r: r["group"]).values():
        seeds, sums = [], []
        for i in sorted(indices, key=lambda i: (rows[i][by[0]], rows[i][by[1]])):
            x = unit(vectors[i])
            distance = [1 - sum(a * b for a, b in zip(x, unit(s), strict=True)) for s in sums]
            nearest = min(distance, default=math.inf)
            if nearest <= epsilon + 1e-6:
                c = next(c for c, d in enumerate(distance) if d <= nearest + 1e-12)
                leader[i] = seeds[c]
                if centroid == "mean":
                    sums[c] = [a + b for a, b in zip(sums[c], x, strict=True)]
            else:
                leader[i] = i
                seeds.append(i)
                sums.append(x)
    return leader


def ngram_vector(text, n, dim=512):
    words = ["\x02"] * (n - 1) + text.lower().split() + ["\x03"]
    out = [0.0] * dim
    for i in range(len(words) - n + 1):
        out[zlib.crc32(" ".join(words[i : i + n]).encode()) % dim] += 1
    return out


def r2(rows):
    """Leave-one-out R^2 of predicting a return from cluster mates of other trajectories of the group."""
    base = error = 0.0
    for row in rows:
        others = [r for r in rows if r["group"] == row["group"] and r["trajectory"] != row["trajectory"]]
        if others:
            m = mean([r["ret"] for r in others])
            mates = [r["ret"] for r in others if r["cluster"] == row["cluster"]]
            base += (row["ret"] - m) ** 2
            error += (row["ret"] - (sum(mates) + m) / (len(mates) + 1)) ** 2
    return 1 - error / base if base else 0.0


# What is logged --------------------------------------------------------------------------------------------------


def p90(values):
    """Linear interpolation between the two nearest ranks."""
    values, at = sorted(values), 0.9 * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def diagnose(name, rows, config):
    """The diagnostics of a `<partition>_<baseline>` estimator."""
    partition, baseline = PAIRINGS[name] if name in PAIRINGS else name.rsplit("_", 1)
    _, step, total, branch = estimate(name, rows, config)
    parts = list(parts_of(rows, partition).values())
    groups = members(rows, lambda r: r["group"])
    sizes = [len(p) for p in parts]
    multi = [p for p in parts if len(p) > 1]
    keys = [len({rows[i]["action"] for i in p}) for p in parts]
    largest = [p for p in parts if len(p) == max(sizes)]
    out = {
        "steps": len(rows),
        "groups": len(groups),
        "groups_of_one": sum(len({rows[i]["trajectory"] for i in g}) == 1 for g in groups.values()),
        "groups_without_signal": sum(all(abs(total[i]) <= FLAT for i in g) for g in groups.values()),
        "trajectories": len({(r["group"], r["trajectory"]) for r in rows}),
        "clusters": len(parts),
        "cluster_singleton_rate": sizes.count(1) / len(parts),
        "row_singleton_rate": sizes.count(1) / len(rows),
        "cluster_size_mean": mean(sizes),
        "cluster_size_p90": p90(sizes),
        "giant_share": max(len(p) / len(groups[rows[p[0]]["group"]]) for p in largest),
        "matched_pairs": sum(math.comb(n, 2) for n in sizes),
        "rows_pace": branch.count("PACE") / len(rows),
        "rows_fallback": branch.count("FALLBACK") / len(rows),
        "rows_singleton": branch.count("SINGLETON") / len(rows),
        "step_share_zero": sum(abs(x) <= FLAT for x in step) / len(rows),
        "keys_per_cluster": mean(keys),
        "purity": sum(max(Counter(rows[i]["state"] for i in p).values()) for p in parts) / len(rows),
    }
    if multi:
        squares = sum(std([rows[i]["ret"] for i in p]) ** 2 * (len(p) - 1) for p in multi)
        out["return_std_within"] = math.sqrt(squares / sum(len(p) - 1 for p in multi))
        out["clusters_multi_key"] = mean([k > 1 for k, n in zip(keys, sizes, strict=True) if n > 1])
    return {f"bipace/{key}": float(value) for key, value in out.items()}


def write(values, spans, length):
    """One row: values on the columns that predict each span's tokens."""
    out = [0.0] * (length - 1)
    for value, (start, end) in zip(values, spans, strict=True):
        for token in range(start, end):
            out[token - 1] = value
    return out


# Random input ----------------------------------------------------------------------------------------------------


def random_rows(rng, groups=3, trajectories=5, turns=7):
    """Shuffled rows of small groups, with ties, lone actions, singletons and groups of one trajectory."""
    rows = []
    for g in range(groups):
        for t in range(rng.randint(1, trajectories)):
            score = rng.choice([0.0, 1.0, 0.5])
            for turn in range(rng.randint(1, turns)):
                state = rng.randrange(4)
                observation = f"s {state} {rng.choice(['a', 'b'])} of g"
                rows.append(
                    {
                        "group": f"g{g}",
                        "trajectory": 3 * t,  # with gaps
                        "turn": 2 * turn,
                        "ret": rng.choice([0.0, 1.0, -0.1, round(rng.random(), 2)]),
                        "score": score - rng.choice([0.0, 0.0, 0.1]),
                        "action": rng.choice("xxyz"),
                        "observation": observation,
                        "cluster": 10 * g + rng.randrange(3),
                        "state": state,
                        "ngram": observation,
                    }
                )
    rng.shuffle(rows)
    return rows


def columns(rows):
    """The same rows as keyword arguments of a StepBatch."""
    names = {
        "action": "action_key",
        "observation": "observation_key",
        "state": "state_key",
        "ngram": "observation_text",
    }
    return {names.get(key, key): [row[key] for row in rows] for key in rows[0]}
