"""What the methods of the standard library's types give, and what they pass to a closure."""

from .types import FOREIGN, LISTS, MAPS, UNIT

NUMBER = ("std", "number", ())
BOOL = ("std", "bool", ())
TEXT = ("std", "str", ())

SAME = {
    "clone", "to_owned", "as_ref", "as_mut", "as_deref", "as_deref_mut", "cloned", "copied", "borrow", "borrow_mut",
    "deref", "deref_mut", "by_ref", "to_vec", "as_slice", "as_mut_slice", "iter", "iter_mut", "into_iter", "drain",
    "rev", "skip", "take", "step_by", "filter", "skip_while", "take_while", "inspect", "chain", "fuse", "peekable",
    "cycle", "into_boxed_slice", "or", "xor", "or_else", "replace", "split_off", "leak", "into_inner", "extract_if",
    "as_pin_mut",
}  # fmt: skip
OPTIONAL_ELEMENT = {
    "get", "get_mut", "first", "last", "first_mut", "last_mut", "pop", "pop_front", "pop_back", "front", "front_mut",
    "back", "back_mut", "peek", "peek_mut", "next", "next_back", "nth", "min", "max", "min_by_key", "max_by_key",
    "min_by", "max_by", "find", "reduce", "pop_first", "pop_last", "next_if",
}  # fmt: skip
FALSE_OR_TRUE = {
    "is_some", "is_none", "is_ok", "is_err", "is_empty", "contains", "contains_key", "is_some_and", "is_none_or",
    "is_ok_and", "any", "all", "eq", "ne", "starts_with", "ends_with",
}  # fmt: skip
# Names of methods that the standard library's types have: a receiver that is not known says nothing about whose such a method is.
COMMON = SAME | OPTIONAL_ELEMENT | FALSE_OR_TRUE | {
    "len", "insert", "remove", "push", "push_back", "push_front", "clear", "extend", "retain", "entry", "values",
    "keys", "map", "count", "sum", "fold", "collect", "enumerate", "zip", "unwrap", "expect", "unwrap_or",
    "unwrap_or_default", "unwrap_or_else", "ok", "err", "lock", "load", "store", "send", "recv", "join", "set", "write",
    "read", "flush", "split", "reserve", "capacity", "truncate", "append", "into", "from", "fmt", "hash", "cmp",
    "partial_cmp", "default", "to_string", "parse", "trim", "chars", "bytes", "lines", "position", "contains",
    "as_bytes", "as_str", "as_ptr", "min", "max", "abs", "pow", "elapsed", "duration_since", "write_all", "try_into",
    "add", "sub", "close", "port", "ip", "is_ipv4", "is_ipv6", "resize", "swap", "fill", "sort", "update", "wait",
    "range", "end", "start", "connect", "accept", "bind", "shutdown", "index", "drop", "new", "id", "kind", "name",
    "then", "then_some", "find_map", "source", "as_fd", "as_raw_fd", "line", "encode", "decode",
}  # fmt: skip


def optional(kind):
    return ("std", "Option", (kind,))


def listed(kind):
    return ("std", "Iter", (kind,))


def result_of(kind):
    return kind[2] if kind and kind[0] == "fn" else None


def argument(kind, at=0):
    return kind[2][at] if kind and kind[0] == "std" and len(kind[2]) > at else None


def is_foreign(kind):
    """Whether a type is of other crates through and through, so that what its methods give is, too."""
    if kind is None:
        return False
    match kind[0]:
        case "tuple":
            return all(map(is_foreign, kind[1]))
        case "std":
            return all(map(is_foreign, kind[2])) and not (kind[1] in LISTS | MAPS | {"Option", "Result"} and not kind[2])
        case "fn":
            return is_foreign(kind[2])
    return False


def closure_takes(base, name, element):
    """The types of the parameters of a closure that the method gets, by the place of the argument."""
    owner = base[1]
    if owner == "Option" or owner == "Result":
        value = argument(base)
        if name in ("map_err", "or_else", "unwrap_or_else", "inspect_err") and owner == "Result":
            return {0: (argument(base, 1),)}
        return {0: (value,), 1: (value,)}
    if owner in MAPS:
        if name in ("retain", "extract_if"):
            return {0: base[2][:2], 1: base[2][:2]}
        return {0: (element,)}
    if owner == "Entry":
        return {0: (argument(base, 1),)}
    if name in ("fold", "try_fold"):
        return {1: (None, element)}
    if name in ("sort_by", "min_by", "max_by", "sort_unstable_by", "reduce", "dedup_by", "is_sorted_by"):
        return {0: (element, element)}
    if name == "scan":
        return {1: (None, element)}
    return {0: (element,), 1: (element,)}


def gives(base, name, arguments, element):
    """The type of a method's result; `None` if it is not known."""
    kind = known(base, name, arguments, element)
    if kind is None and is_foreign(base) and all(map(is_foreign, arguments)):
        return FOREIGN
    return kind


def known(base, name, arguments, element):
    owner = base[1]
    first = arguments[0] if arguments else None
    if name in FALSE_OR_TRUE:
        return BOOL
    if name in ("len", "count", "capacity"):
        return NUMBER
    if owner == "Option" or owner == "Result":
        return of_option(base, name, arguments, first)
    if owner in MAPS:
        key, value = argument(base), argument(base, 1)
        match name:
            case "get" | "get_mut" | "remove" | "insert":
                return optional(value)
            case "values" | "values_mut" | "into_values":
                return listed(value)
            case "keys" | "into_keys":
                return listed(key)
            case "entry":
                return ("std", "Entry", (key, value))
            case "first_key_value" | "last_key_value" | "pop_first" | "pop_last" | "get_key_value" | "remove_entry":
                return optional(("tuple", (key, value)))
            case "iter" | "iter_mut" | "into_iter" | "drain" | "range" | "range_mut" | "extract_if":
                return listed(("tuple", (key, value)))
            case "first_entry" | "last_entry":
                return optional(("std", "Entry", (key, value)))
    if owner in ("Entry", "OccupiedEntry", "VacantEntry"):
        if name in ("or_default", "or_insert", "or_insert_with", "get", "get_mut", "into_mut", "insert", "remove"):
            return argument(base, 1)
        return base if name == "and_modify" else argument(base) if name == "key" else None
    if owner in ("Mutex", "RwLock") and name in ("lock", "read", "write", "into_inner"):
        return ("std", "Result", (argument(base), None))
    if owner in ("RefCell", "Cell", "OnceLock", "OnceCell"):
        if name in ("get", "get_mut") and owner in ("OnceLock", "OnceCell"):
            return optional(argument(base))
        return argument(base)
    if owner in ("ArcSwap", "ArcSwapOption", "Slab") or name in ("checked_sub", "checked_add", "checked_mul", "checked_div"):
        return of_some_crates(base, name)
    if owner == "foreign" and name in ("ok_or", "ok_or_else", "map_err"):
        return FOREIGN
    if owner == "foreign" and result_of(first) is not None:
        return result_of(first) if name == "and_then" else optional(result_of(first)) if name == "map" else None
    if owner == "Weak":
        return optional(argument(base)) if name == "upgrade" else base
    if owner == "Into":
        return argument(base)
    if owner in LISTS:
        return of_list(base, name, arguments, first, element)
    if owner == "bool" and name in ("then", "then_some"):
        return optional(result_of(first) if name == "then" else first)
    return base if name in SAME else None


def of_some_crates(base, name):
    match base[1]:
        case "ArcSwap":
            return argument(base)
        case "ArcSwapOption":
            return optional(argument(base))
        case "Slab" if name in ("get", "get_mut", "try_remove"):
            return optional(argument(base))
        case "Slab" if name in ("iter", "iter_mut", "drain"):
            return listed(("tuple", (NUMBER, argument(base))))
        case "Slab":
            return argument(base) if name == "remove" else FOREIGN
    return optional(NUMBER)


def of_option(base, name, arguments, first):
    value, owner = argument(base), base[1]
    match name:
        case "unwrap" | "expect" | "unwrap_or" | "unwrap_or_default" | "unwrap_or_else":
            return value if value is not None else first
        case "insert" | "get_or_insert" | "get_or_insert_with":
            return value if value is not None else first
        case "map":
            return ("std", owner, (result_of(first), *base[2][1:]))
        case "and_then":
            return result_of(first)
        case "and":
            return first
        case "map_or":
            return first or result_of(arguments[1] if len(arguments) > 1 else None)
        case "map_or_else":
            return result_of(first)
        case "ok_or" | "ok_or_else":
            return ("std", "Result", (value, first if name == "ok_or" else result_of(first)))
        case "ok":
            return optional(value)
        case "err":
            return optional(argument(base, 1))
        case "map_err":
            return ("std", "Result", (value, result_of(first)))
        case "zip":
            return optional(("tuple", (value, argument(first))))
        case "flatten":
            return value
        case "unwrap_err" | "expect_err":
            return argument(base, 1)
        case "iter" | "iter_mut" | "into_iter":
            return listed(value)
        case "transpose":
            inner = argument(value)
            return ("std", "Option" if owner == "Result" else "Result", (("std", owner, (inner,)),))
    return base if name in SAME | {"take_if", "inspect_err"} else None


def of_list(base, name, arguments, first, element):
    owner = base[1]
    if name in ("collect", "copied", "cloned", "rev", "skip", "take", "filter", "chain", "peekable"):
        return listed(element)
    if name in OPTIONAL_ELEMENT:
        return optional(element)
    match name:
        case "map":
            return listed(result_of(first))
        case "filter_map" | "flat_map" | "map_while" | "flatten":
            inner = element if name == "flatten" else result_of(first)
            if inner and inner[0] == "std" and inner[1] in MAPS:
                return listed(("tuple", inner[2][:2]))
            return listed(argument(inner))
        case "find_map":
            return result_of(first)
        case "enumerate":
            return listed(("tuple", (NUMBER, element)))
        case "zip":
            return listed(("tuple", (element, argument(first))))
        case "position" | "rposition":
            return optional(NUMBER)
        case "swap_remove" | "index":
            return element
        case "remove":
            return optional(element) if owner == "VecDeque" else element
        case "fold" | "sum" | "product":
            return first
        case "chunks" | "chunks_exact" | "windows" | "chunks_mut" | "chunks_exact_mut" | "chunk_by" | "split" | "rchunks":
            return listed(("std", "Vec", (element,)))
        case "partition" | "split_at" | "split_at_mut":
            return ("tuple", (("std", "Vec", (element,)),) * 2)
        case "split_first" | "split_last" | "split_first_mut" | "split_last_mut":
            return optional(("tuple", (element, ("std", "Vec", (element,)))))
        case "unzip":
            parts = element[1] if element and element[0] == "tuple" else (None, None)
            return ("tuple", tuple(("std", "Vec", (part,)) for part in parts))
        case "for_each" | "push" | "push_back" | "push_front" | "clear" | "extend" | "retain" | "sort" | "truncate":
            return UNIT
        case "as_chunks" | "first_chunk" | "last_chunk":
            return None
    return base if name in SAME else None
