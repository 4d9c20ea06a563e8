"""The definitions once more, as plain Python loops over lists: slow, obvious, and written without torch.

Tests compare `headbank.numerics` with these on random inputs. Lists nest in the order of the shapes in the
docstrings there. Nothing here checks its input.
"""

import math
from itertools import product


def span_mass(token_mass, spans):
    """[T] -> [D]: attention summed over each half-open span."""
    masses = []
    for start, end in spans:
        total = 0.0
        for token in range(len(token_mass)):
            if start <= token < end:
                total += token_mass[token]
        masses.append(total)
    return masses


def top_windows(token_mass, span, width, count):
    """Greedy best windows inside the span, earlier first among equals."""
    start, end = span
    if start == end:
        return []
    if end - start <= width:
        return [(start, end)][:count]
    found = []
    while len(found) < count:
        best = None
        for first in range(start, end - width + 1):
            if any(first < taken_end and taken < first + width for taken, taken_end in found):
                continue
            mass = sum(token_mass[first + i] for i in range(width))
            if best is None or mass > best[0]:
                best = (mass, first)
        if best is None:
            break
        found.append((best[1], best[1] + width))
    return found


def is_activated(means, gold):
    """[D] -> bool: every gold is above every distractor."""
    for i, j in product(range(len(means)), repeat=2):
        if gold[i] and not gold[j] and not means[i] > means[j]:
            return False
    return True


def average_precision(means, gold):
    """[D] -> AP, equal means ranked by input index."""
    order = by_score(means)
    found, total = 0, 0.0
    for place, document in enumerate(order, start=1):
        if gold[document]:
            found += 1
            total += found / place
    return total / found


def by_score(scores):
    """Indices by score descending, then index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def quantile(values, q):
    """Quantile with linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def passes(f, strength, tau_f, tau_p, eligible):
    """[P][L][H] -> [P][L][H] bool: both thresholds, the quantile over eligible heads of the placement."""
    passed = []
    for p in range(len(f)):
        heads = [s for layer, row in enumerate(strength[p]) if eligible[layer] for s in row]
        threshold = quantile(heads, tau_p)
        passed.append(
            [
                [
                    eligible[layer] and 0 < f[p][layer][h] >= tau_f and strength[p][layer][h] >= threshold
                    for h in range(len(f[p][layer]))
                ]
                for layer in range(len(f[p]))
            ]
        )
    return passed


def select_experts(f, strength, soft, count, tau_f, tau_p, eligible):
    """[P][L][H] -> (heads, strict): experts first, then the heads with the best worst-placement precision."""
    passed = passes(f, strength, tau_f, tau_p, eligible)
    placements = range(len(f))

    def column(scores, head):
        return [scores[p][head[0]][head[1]] for p in placements]

    def mean(values):
        return sum(values) / len(values)

    heads = [(layer, h) for layer in range(len(f[0])) if eligible[layer] for h in range(len(f[0][layer]))]
    experts = [head for head in heads if all(column(passed, head))]
    others = [head for head in heads if head not in experts]
    experts.sort(key=lambda h: (-min(column(f, h)), -mean(column(strength, h)), h))
    others.sort(key=lambda h: (-min(column(soft, h)), -mean(column(soft, h)), h))
    strict = min(count, len(experts))
    return (experts + others)[:count] if strict < count else experts[:count], strict


def average_ranks(row):
    """[D] -> [D]: 1 for the largest; equal values share the average of the places they take."""
    ranks = []
    for value in row:
        above = sum(other > value for other in row)
        equal = sum(other == value for other in row)
        ranks.append(sum(above + place for place in range(1, equal + 1)) / equal)
    return ranks


def borda(means):
    """[n][D] -> [D]: points for documents beaten, half for ties, as a share of all that could be won."""
    documents = len(means[0])
    if documents == 1:
        return [1.0]
    scores = []
    for i in range(documents):
        points = 0.0
        for row, j in product(means, range(documents)):
            if i != j:
                points += 1.0 if row[i] > row[j] else 0.5 if row[i] == row[j] else 0.0
        scores.append(points / (len(means) * (documents - 1)))
    return scores


def rrf(means, k):
    """[n][D] -> [D]: reciprocal ranks summed over heads, divided by the largest possible sum."""
    ranked = [average_ranks(row) for row in means]
    most = len(means) / (k + 1)
    return [sum(1 / (k + row[i]) for row in ranked) / most for i in range(len(means[0]))]


def share(means):
    """[n][D] -> [D]: mean over heads of each document's share of the head's attention."""
    documents = len(means[0])
    totals = [0.0] * documents
    for row in means:
        whole = sum(row)
        for i in range(documents):
            totals[i] += row[i] / whole if whole else 1 / documents
    return [total / len(means) for total in totals]


def ranks(means):
    """[n][D] -> [n][D]: 1-based place of each document for each head."""
    places = []
    for row in means:
        order = by_score(row)
        places.append([order.index(i) + 1 for i in range(len(row))])
    return places


def rank_metrics(order, relevance, k):
    """Metrics of one ranking: precision, NDCG with linear gains, AP, reciprocal rank, recall."""
    relevant = sum(grade >= 1 for grade in relevance)
    hits = [relevance[i] >= 1 for i in order]

    def dcg(grades):
        return sum(grade / math.log2(place + 1) for place, grade in enumerate(grades[:k], start=1))

    ideal = dcg(sorted(relevance, reverse=True))
    precisions = [sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits) if hit]
    return {
        f"P@{k}": sum(hits[:k]) / k,
        f"NDCG@{k}": dcg([relevance[i] for i in order]) / ideal if ideal else 0.0,
        "MAP": sum(precisions) / relevant if relevant else 0.0,
        "MRR": 1 / (hits.index(True) + 1) if any(hits) else 0.0,
        f"R@{k}": sum(hits[:k]) / relevant if relevant else 0.0,
    }


def sign_flip_p_value(differences):
    """Share of all sign patterns whose sum is at least as far from zero as the observed one."""
    observed = abs(sum(differences))
    patterns = list(product((1, -1), repeat=len(differences)))
    extreme = sum(abs(sum(s * d for s, d in zip(p, differences, strict=True))) >= observed for p in patterns)
    return extreme / len(patterns)
