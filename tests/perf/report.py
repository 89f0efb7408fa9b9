"""Rows of figures: a median, a spread, a limit and an aim."""

from harness import Failed, median, say

# A load that was not sent proves nothing; senders round the rate.
SENT_SHARE = 0.98


def rounds(count, name, once):
    """What `once` returned in each round; a round that failed is said and left out."""
    found = []
    for round_ in range(1, count + 1):
        try:
            values = once(round_)
        except Failed as error:
            say(f"{name} {round_}: {error}")
            continue
        say(f"{name} {round_}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
        found.append(values)
    return found


def figure(what, values, unit, limit=None, aim=None, at_most=False, sent=None):
    """A row. Without a limit it is there to compare. `sent` are the shares of the offered load that were really sent."""
    values = [value for value in values if value is not None]
    row = {"what": what, "unit": unit, "values": values, "limit": limit, "aim": aim, "at_most": at_most}
    row["median"] = median(values)
    if limit is None:
        row["verdict"] = ""
    elif not values:
        row["verdict"] = "no result"
    elif sent and median(sent) < SENT_SHARE:
        row["verdict"] = f"NOT SHOWN: only {100 * median(sent):.0f} % of the load was sent"
    else:

        def reached(bound):
            return bound is not None and (row["median"] <= bound if at_most else row["median"] >= bound)

        row["verdict"] = "ok, aim reached" if reached(aim) else "ok" if reached(limit) else "MISSED"
    return row


def bounded(values, at_most, at_least):
    """Rows of what took part: both tables have a limit and an aim by load, way and name, which `values` takes."""
    for bounds, is_most in ((at_most, True), (at_least, False)):
        for (load, way, name), (limit, aim) in bounds.items():
            if found := values(load, way, name):
                yield figure(f"{load}, {way}: {name}", found, "", limit, aim, is_most)


def column(found, key):
    return [values[key] for values in found]


def alternating(round_, kinds):
    return kinds if round_ % 2 else kinds[::-1]


def head():
    print(f"{'':66} {'median':>8} {'':7}{'(spread)':<22}{'limit':>8}{'aim':>9}")


def show(row):
    def number(value):
        return "-" if value is None else f"{value:.4g}"

    sign = "≤" if row["at_most"] else "≥"
    limit = f"{sign} {number(row['limit'])}" if row["limit"] is not None else ""
    aim = f"{sign} {number(row['aim'])}" if row["aim"] is not None else ""
    spread = f"({number(min(row['values']))} to {number(max(row['values']))})" if row["values"] else ""
    print(f"{row['what']:<66} {number(row['median']):>8} {row['unit']:<7}{spread:<22}{limit:>8}{aim:>9}  {row['verdict']}", flush=True)


def missed(rows):
    """Says how many rows keep no limit, and returns that."""
    count = sum(row["verdict"].startswith(("MISSED", "NOT SHOWN", "no result", "failed")) for row in rows)
    print(f"\n{count} missed or not shown" if count else "\nevery limit kept")
    return count
