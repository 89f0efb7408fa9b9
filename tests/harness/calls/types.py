"""Names and types: what a path names, which type a field, a parameter or a method's result has, whose method a call takes.

A type is `None` if it is not known, or ("own", declaration, arguments) of the workspace, ("std", name, arguments) of others,
("tuple", types), ("fn", parameters, result), ("param", name, traits) or ("traits", traits). References, pointers and guards stand for
their content.
"""

from .items import Function, Module, Type

POINTERS = {"Box", "Arc", "Rc", "Pin", "ManuallyDrop", "Cow", "LazyLock"}
GUARDS = {"Ref", "RefMut", "MutexGuard", "RwLockReadGuard", "RwLockWriteGuard"}
ITERATORS = {"Iterator", "IntoIterator", "ExactSizeIterator", "DoubleEndedIterator", "FusedIterator", "Range", "RangeInclusive"}
LISTS = {"Vec", "VecDeque", "BTreeSet", "HashSet", "BinaryHeap", "Iter", "IntoIter", "IterMut", "Drain", "Peekable"}
MAPS = {"HashMap", "BTreeMap", "IndexMap"}
UNIT = ("tuple", ())
NEVER = ("std", "!", ())
# Some type of another crate, in which no type of the workspace is.
FOREIGN = ("std", "foreign", ())
DEEPEST = 12


class Scope:
    """Where a type is written: its module, the generics around it, what `Self` is and has."""

    def __init__(self, module, generics, self_type, block=None):
        self.module, self.generics, self.self_type, self.block = module, generics, self_type, block


class Types:
    def __init__(self, workspace):
        self.workspace = workspace
        self.crates = {}
        for name, module in workspace.crates.items():
            self.crates[name] = self.crates[name.removeprefix("culvert_")] = module
        self.of_others, self.blanket, self.by_name = {}, {}, {}
        self.scopes, self.fields_known = {}, {}
        for block in workspace.impls:
            self.place(block)
        for function in workspace.functions:
            if function.block:
                self.by_name.setdefault(function.name, set()).add((function.module.crate, function.owner))

    def place(self, block):
        """Gives a block's methods to their type."""
        scope = self.scope_of_block(block)
        target = scope.self_type
        if target and target[0] == "own":
            block.owner, methods = target[1], target[1].methods
            target[1].impls.append(block)
        elif target and target[0] in ("std", "tuple"):
            block.owner = target[1] if target[0] == "std" else "tuple"
            methods = self.of_others.setdefault(block.owner, {})
        else:
            block.owner, methods = "blanket", self.blanket
        for function in block.functions:
            methods.setdefault(function.name, []).append(function)

    # Names.

    def lookup(self, module, name, depth=0, inside=False, value=False):
        """What `name` is in a module: a module, a type, a function, or `None`.

        `inside` a body, what is around it counts, too. A `value` is a function rather than a module.
        """
        if depth > DEEPEST:
            return None
        found = None
        for names in (module.values, module.names) if value else (module.names, module.values):
            if found is None or value and isinstance(found, Module):
                found = names.get(name, found)
                if isinstance(found, tuple) and found[0] == "use":
                    found = self.resolve(module, found[1], depth + 1, name, value)
        if found is None:
            for path in module.globs:
                above = self.resolve(module, path, depth + 1)
                if isinstance(above, Module) and above is not module:
                    found = self.lookup(above, name, depth + 1, False, value)
                elif isinstance(above, Type) and name in above.variants:
                    found = ("variant", above, name)
                if found is not None:
                    break
        if found is None and inside and module.lexical:
            found = self.lookup(module.lexical, name, depth + 1, True, value)
        return found

    def resolve(self, module, path, depth=0, own=None, value=False):
        """What a path names, as `lookup`; also ("variant", type, name), ("member", type, name) and ("std", path)."""
        first, rest = path[0], path[1:]
        here = module
        while here.lexical:
            here = here.lexical
        if first == "crate":
            found = self.workspace.crates[here.crate]
        elif first == "self":
            found = here
        elif first == "super":
            found = here.parent
            while rest and rest[0] == "super" and found:
                found, rest = found.parent, rest[1:]
        else:
            found = self.lookup(module, first, depth + 1, True, value and not rest) if first != own else None
            if found is None:
                found = self.crates.get(first)
        for at, name in enumerate(rest):
            if isinstance(found, Module):
                is_value = value and at + 1 == len(rest)
                found = self.lookup(found, name, depth + 1, False, is_value) or ("const", found, name)
            elif isinstance(found, Type):
                found = ("variant", found, name) if name in found.variants else ("member", found, name)
            elif found is None or isinstance(found, tuple) and found[0] == "std":
                return ("std", path)
            else:
                return None
        return found if found is not None else ("std", path)

    # Types.

    def scope(self, module, generics, self_type, block, around=None):
        scope = Scope(module, dict(around.generics) if around else {}, self_type, block)
        bounds = {}
        for name, bound in generics:
            bounds.setdefault(name, []).extend(bound)
        for name in bounds:
            scope.generics.setdefault(name, ("param", name, ()))
        for name, bound in bounds.items():
            if bound:
                found = self.bounds(bound, scope)
                if found and found[0] == "traits":
                    found = ("param", name, found[1])
                elif found and found[0] == "std" and found[1] in ("foreign", "Into"):
                    found = None
                scope.generics[name] = found or scope.generics[name]
        return scope

    def scope_of_block(self, block):
        if block not in self.scopes:
            if isinstance(block.owner, Type) and block.owner.kind == "trait" and block.target is None:
                self_type = ("param", "Self", (block.owner,))
                self.scopes[block] = self.scope(block.module, block.generics, self_type, block)
            else:
                scope = self.scopes[block] = self.scope(block.module, block.generics, None, block)
                scope.self_type = self.type(block.target, scope)
        return self.scopes[block]

    def scope_of_type(self, declared):
        if declared not in self.scopes:
            scope = self.scopes[declared] = self.scope(declared.module, declared.generics, None, None)
            names = dict.fromkeys(name for name, _ in declared.generics)
            scope.self_type = ("own", declared, tuple(("param", name, ()) for name in names))
        return self.scopes[declared]

    def scope_of(self, function):
        if function not in self.scopes:
            around = self.scope_of_block(function.block) if function.block else None
            self.scopes[function] = self.scope(
                function.module, function.generics, around and around.self_type, function.block, around
            )
        return self.scopes[function]

    def bounds(self, bounds, scope):
        traits = []
        for bound in bounds:
            if bound[0] == "fn":
                return self.type(bound, scope)
            _, segments, arguments, bindings = bound
            found = self.resolve(scope.module, segments)
            if isinstance(found, Type) and found.kind == "trait":
                traits.append(found)
            elif segments[-1] in ITERATORS:
                return ("std", "Iter", (self.type(bindings.get("Item"), scope),))
            elif segments[-1] in ("Deref", "DerefMut"):
                return self.type(bindings.get("Target"), scope)
            elif segments[-1] == "Future":
                return self.type(bindings.get("Output"), scope)
            elif segments[-1] in ("AsRef", "AsMut", "Borrow", "BorrowMut", "Into") and arguments:
                return ("std", "Into", (self.type(arguments[0], scope),))
        if traits:
            return ("traits", tuple(traits))
        return FOREIGN if bounds else None

    def type(self, written, scope, depth=0):
        if written is None or depth > DEEPEST:
            return None
        match written[0]:
            case "tuple":
                return ("tuple", tuple(self.type(each, scope, depth + 1) for each in written[1]))
            case "list":
                return ("std", "Vec", (self.type(written[1], scope, depth + 1),))
            case "fn":
                params = tuple(self.type(each, scope, depth + 1) for each in written[1])
                return ("fn", params, self.type(written[2], scope, depth + 1))
            case "bounds":
                return self.bounds(written[1], scope)
            case "as":
                base = self.type(written[1], scope, depth + 1)
                return self.member_type(base, written[2][0], scope, depth) if written[2] else base
        _, segments, arguments, bindings = written
        if segments[0] == "Self":
            return scope.self_type if len(segments) == 1 else self.member_type(scope.self_type, segments[1], scope, depth)
        if segments[0] in scope.generics:
            base = scope.generics[segments[0]]
            return base if len(segments) == 1 else self.member_type(base, segments[1], scope, depth)
        found = self.resolve(scope.module, segments)
        given = tuple(self.type(each, scope, depth + 1) for each in arguments)
        if isinstance(found, Type):
            return self.of_declared(found, given, depth)
        if found and found[0] == "std":
            return of_others(segments[-1], given)
        return None

    def of_declared(self, declared, given, depth=0):
        if declared.kind == "trait":
            return ("traits", (declared,))
        names = list(dict.fromkeys(name for name, _ in declared.generics))
        given = given + (None,) * (len(names) - len(given))
        if declared.kind == "alias":
            return substitute(self.type(declared.target, self.scope_of_type(declared), depth + 1), dict(zip(names, given)))
        return ("own", declared, given)

    def member_type(self, base, name, scope, depth):
        """`T::Name`."""
        if scope.block and base == scope.self_type and name in scope.block.types:
            return self.type(scope.block.types[name], scope, depth + 1)
        if base and base[0] == "own":
            for block in base[1].impls:
                if name in block.types:
                    inner = self.scope_of_block(block)
                    return substitute(self.type(block.types[name], inner, depth + 1), unify(inner.self_type, base, {}))
        if base and base[0] in ("param", "traits"):
            for trait in self.with_above(base[-1]):
                if name in trait.types:
                    inner = self.scopes.get(trait) or self.scope(trait.module, trait.generics, base, None)
                    return self.type(trait.types[name], inner, depth + 1)
        if base and base[0] == "std" and name == "Item":
            return base[2][0] if base[2] else None
        return None

    def with_above(self, traits, depth=0):
        """Traits and those that they ask for."""
        for trait in traits:
            yield trait
            if depth < DEEPEST and trait.above:
                above = self.bounds(trait.above, Scope(trait.module, {}, None))
                if above and above[0] == "traits":
                    yield from self.with_above(above[1], depth + 1)

    def field(self, base, name, depth=0):
        if base and base[0] == "tuple" and name.isdigit():
            return base[1][int(name)] if int(name) < len(base[1]) else None
        if base and base[0] == "std" and not base[2]:
            return FOREIGN
        if not base or base[0] != "own" or depth > DEEPEST:
            return None
        if name in base[1].fields:
            return self.of_field(base, (name,), base[1].fields[name])
        under = self.dereferenced(base)
        return self.field(under, name, depth + 1) if under else None

    def of_variant(self, base, variant):
        """The types of a variant's fields, by name."""
        return {name: self.of_field(base, (variant, name), written) for name, written in base[1].variants[variant].items()}

    def of_field(self, base, key, written):
        key = (base[1], *key)
        scope = self.scope_of_type(base[1])
        if key not in self.fields_known:
            self.fields_known[key] = self.type(written, scope)
        return substitute(self.fields_known[key], self.arguments_of(base))

    def arguments_of(self, base):
        return dict(zip(dict.fromkeys(name for name, _ in base[1].generics), base[2]))

    def dereferenced(self, base):
        for block in base[1].impls:
            if block.trait and block.trait[0] == "path" and block.trait[1][-1] == "Deref" and "Target" in block.types:
                scope = self.scope_of_block(block)
                return substitute(self.type(block.types["Target"], scope), unify(scope.self_type, base, {}))
        return None

    def peeled(self, base):
        """What a type of the workspace derefs to, if that is a type of others."""
        while base and base[0] == "own" and (under := self.dereferenced(base)):
            base = under
        return base

    def element(self, base):
        """What iterating over a value gives."""
        if base is None:
            return None
        if base[0] == "std":
            if not base[2] and base[1] not in LISTS | MAPS | {"Option"}:
                return FOREIGN
            if base[1] in MAPS and len(base[2]) > 1:
                return ("tuple", base[2][:2])
            return base[2][0] if base[2] else None
        if base[0] == "own":
            for block in base[1].impls:
                if block.trait and block.trait[0] == "path" and block.trait[1][-1] in ITERATORS and "Item" in block.types:
                    scope = self.scope_of_block(block)
                    return substitute(self.type(block.types["Item"], scope), unify(scope.self_type, base, {}))
            under = self.peeled(base)
            return self.element(under) if under[0] == "std" else None
        return None

    def method(self, base, name, depth=0):
        """The function that a call of a method takes, and what its generics are."""
        if base is None or depth > DEEPEST:
            return None
        if base[0] == "own":
            declared = base[1]
            found = self.choose(declared.methods.get(name, ()), base)
            found = found or self.of_traits(self.traits_of(declared), name, base)
            found = found or self.choose(self.blanket.get(name, ()), base)
            if found:
                return found
            under = self.dereferenced(base)
            return self.method(under, name, depth + 1) if under else None
        if base[0] in ("param", "traits"):
            return self.of_traits(base[-1], name, base) or self.choose(self.blanket.get(name, ()), base)
        if base[0] in ("std", "tuple"):
            owner = base[1] if base[0] == "std" else "tuple"
            return self.choose(self.of_others.get(owner, {}).get(name, ()), base)
        return None

    def choose(self, functions, base):
        best = None
        for function in functions:
            scope = self.scope_of(function)
            arguments = unify(scope.self_type, base, {})
            if arguments is None:
                continue
            # An inherent method before a trait's.
            if best is None or (best[0].block.trait and not function.block.trait):
                best = (function, arguments)
        return best

    def traits_of(self, declared):
        for block in declared.impls:
            if block.trait and block.trait[0] == "path":
                found = self.resolve(block.module, block.trait[1])
                if isinstance(found, Type):
                    yield found

    def of_traits(self, traits, name, base):
        for trait in self.with_above(traits):
            for function in trait.methods.get(name, ()):
                return (function, {"Self": base})
        return None


def of_others(name, given):
    if name in POINTERS | GUARDS:
        return given[0] if given else None
    if name in ITERATORS:
        return ("std", "Iter", given[:1])
    return ("std", name, given)


def substitute(kind, arguments):
    if kind is None or not arguments:
        return kind
    match kind[0]:
        case "param":
            return arguments.get(kind[1], kind)
        case "tuple":
            return ("tuple", tuple(substitute(each, arguments) for each in kind[1]))
        case "own" | "std":
            return (kind[0], kind[1], tuple(substitute(each, arguments) for each in kind[2])) if kind[2] else kind
        case "fn":
            return ("fn", tuple(substitute(each, arguments) for each in kind[1]), substitute(kind[2], arguments))
    return kind


def unify(wanted, given, arguments):
    """What the generics in `wanted` are, so that it is `given`; `None` if the types differ."""
    if wanted is None or given is None:
        return arguments
    if wanted[0] == "param":
        if arguments.get(wanted[1]) is None:
            arguments[wanted[1]] = given
        return arguments
    if wanted[0] != given[0]:
        return arguments if given[0] in ("param", "traits") or wanted[0] == "traits" else None
    match wanted[0]:
        case "tuple":
            pairs = zip(wanted[1], given[1])
        case "own" | "std":
            if wanted[1] != given[1]:
                return None
            pairs = zip(wanted[2], given[2])
        case "fn":
            pairs = [*zip(wanted[1], given[1]), (wanted[2], given[2])]
        case _:
            pairs = ()
    for one, other in pairs:
        if unify(one, other, arguments) is None:
            return None
    return arguments


def merged(one, other):
    """The type of which more is known."""
    if one is None or one == NEVER:
        return other
    if other is None or other == NEVER or one[0] != other[0]:
        return one
    if one[0] in ("std", "own") and one[1] == other[1] and len(one[2]) == len(other[2]):
        return (one[0], one[1], tuple(merged(a, b) for a, b in zip(one[2], other[2])))
    if one[0] == "tuple" and len(one[1]) == len(other[1]):
        return ("tuple", tuple(merged(a, b) for a, b in zip(one[1], other[1])))
    if one[0] == "std" and other[0] == "std" and one[2] and one[2][0] is None and other[2]:
        # `let x: Vec<_> = ….collect()`.
        return (one[0], one[1], (other[2][0], *one[2][1:]))
    return one
