"""Calls and paths: what the name of a value, a function or a method stands for."""

from .items import Function, Type
from .standard import BOOL, COMMON, argument, closure_takes, gives, is_foreign, optional, result_of
from .tokens import SyntaxProblem, is_name
from .types import FOREIGN, LISTS, MAPS, NEVER, merged, of_others, substitute, unify


class Paths:
    """The part of a body's reader that reads what names something, and calls."""

    def method(self, base, name, given):
        place = self.cursor.at - 2
        found = self.types.method(base, name)
        if found and found[0].takes_self:
            return self.call(found[0], found[1], given, base)
        counts, element = self.calls.counts, self.types.element(base)
        under = self.types.peeled(base)
        if under and under[0] == "std":
            base = under
        if base and (base[0] == "std" or element is not None):
            counts["other"] += 1
            base = base if base[0] == "std" else ("std", "Iter", (element,))
            takes = closure_takes(base, name, element)
            expected = [("fn", takes[at], None) if at in takes else None for at in range(2)]
            kinds = self.arguments(expected)
            kind = gives(base, name, kinds, element)
            if name in ("collect", "sum", "into", "parse", "try_into") and given:
                kind = merged(given[0], kind)
            self.learn(place, base, name, kinds)
            return kind
        if base and base[0] == "fn":
            counts["other"] += 1
            self.arguments()
            return base if name == "clone" else None
        if base and base[0] in ("param", "traits"):
            counts["other"] += 1
            self.arguments()
            return base if name in COMMON else None
        if base and base[0] == "own":
            # Derived, or made by a macro.
            counts["other"] += 1
            self.arguments()
            return base if name in ("clone", "to_owned", "borrow", "as_ref", "as_mut", "min", "max") else None
        return self.unknown(base, name, given)

    def unknown(self, base, name, given):
        """A method of a value of a type that is not known: of the one type that has such a method, if it is no common name."""
        calls = self.calls
        everywhere = self.types.by_name.get(name, ())
        owners = [owner for crate, owner in everywhere if crate == calls.crate]
        if not owners:
            calls.counts["other"] += 1
        elif len(everywhere) == 1 and name not in COMMON:
            owner = owners[0]
            functions = owner.methods.get(name, ()) if isinstance(owner, Type) else ()
            if functions and functions[0].takes_self:
                calls.counts["by name"] += 1
                calls.counts["own"] -= 1
                calls.guessed.append((self.function, functions[0]))
                return self.call(functions[0], {}, given, None)
            calls.counts["other"] += 1
        else:
            calls.counts["unknown"] += 1
            calls.unknown.append((self.function, name, [owner for owner in owners if isinstance(owner, Type)]))
        self.arguments()
        return None

    def call(self, function, arguments, given, base, own=False):
        """A call of a function of the workspace; `own` if its arguments begin with `self`."""
        self.calls.note(self.function, function)
        scope = self.types.scope_of(function)
        wanted = [self.types.type(written, scope) for _, written in function.params]
        if own and function.takes_self:
            wanted.insert(0, scope.self_type)
        arguments = dict(arguments)
        kinds = self.arguments([substitute(kind, arguments) for kind in wanted])
        for kind, value in zip(wanted, kinds):
            unify(kind, value, arguments)
        return self.result(function, arguments, given)

    def result(self, function, arguments, given=()):
        if given:
            names = list(dict.fromkeys(name for name, _ in function.generics))
            arguments = {**arguments, **dict(zip(names, given))}
        scope = self.types.scope_of(function)
        return substitute(self.types.type(function.result, scope), arguments)

    def learn(self, place, base, name, kinds):
        """What is put into a list or map whose elements were not known says what they are."""
        cursor = self.cursor
        if place < 1 or cursor.tokens[place - 1] != "." and not is_name(cursor.tokens[place - 1]):
            return
        variable = cursor.tokens[place - 1]
        names = self.local(variable) if is_name(variable) and cursor.tokens[place - 2] != "." else None
        if names is None or names[variable] != base:
            return
        if name in ("push", "push_back", "push_front", "insert") and base[1] in LISTS and not argument(base) and kinds:
            names[variable] = ("std", base[1], (kinds[-1],))
        if name == "insert" and base[1] in MAPS and not argument(base, 1) and len(kinds) == 2:
            names[variable] = ("std", base[1], tuple(kinds))
        if name == "extend" and base[1] in LISTS and not argument(base) and kinds:
            names[variable] = ("std", base[1], (self.types.element(kinds[0]),))

    # Paths.

    def value_path(self):
        """A path: its segments, and the arguments of the last type."""
        cursor = self.cursor
        segments, given = [], []
        if cursor.peek() == "<":
            written = cursor.type()
            kind = self.types.type(written[1], self.scope)
            return [("type", kind), *written[2]], self.turbofish_here()
        cursor.take("::")
        while True:
            segments.append(cursor.next())
            if cursor.peek() != "::":
                return segments, given
            cursor.at += 1
            if cursor.peek() == "<":
                given = self.turbofish()
                if not cursor.take("::"):
                    return segments, given

    def turbofish_here(self):
        if self.cursor.peek() == "::" and self.cursor.peek(1) == "<":
            self.cursor.at += 1
            return self.turbofish()
        return []

    def resolved(self, segments):
        """What a path in a body names, as `Types.resolve`; a type as ("type", type)."""
        first = segments[0]
        if isinstance(first, tuple):
            kind = first[1]
        elif first == "Self":
            kind = self.scope.self_type
        elif first in self.scope.generics:
            kind = self.scope.generics[first]
        else:
            found = self.types.resolve(self.module, segments, value=True)
            if isinstance(found, Type):
                return ("type", self.types.of_declared(found, ()))
            if isinstance(found, tuple) and found[0] == "member" and found[1].kind == "alias":
                target = self.types.of_declared(found[1], ())
                return ("member of", target, found[2])
            return found
        if len(segments) == 1:
            return ("type", kind)
        if kind and kind[0] == "own" and segments[1] in kind[1].variants:
            return ("variant", kind[1], segments[1])
        if len(segments) == 3:
            return ("member of", self.types.member_type(kind, segments[1], self.scope, 0), segments[2])
        return ("member of", kind, segments[1])

    def named(self, struct):
        cursor = self.cursor
        token = cursor.peek()
        names = self.local(token) if cursor.peek(1) != "::" and not (cursor.peek(1) == "!") else None
        if names is not None:
            cursor.at += 1
            return names[token]
        segments, given = self.value_path()
        if cursor.peek() == "!" and cursor.peek(1) in ("(", "[", "{"):
            return self.macro(segments[-1])
        found = self.resolved(segments)
        if struct and cursor.peek() == "{":
            return self.literal(found)
        called = cursor.peek() == "("
        if isinstance(found, Function):
            return self.function_value(found, {}, given, called)
        if isinstance(found, tuple):
            match found[0]:
                case "variant":
                    return self.constructed(found, called)
                case "type":
                    if called:
                        self.arguments()
                    return found[1]
                case "member":
                    return self.member(self.types.of_declared(found[1], tuple(given)), found[2], given, called)
                case "member of":
                    return self.member(found[1], found[2], given, called)
                case "std":
                    return self.of_others(segments, given, called)
                case "const":
                    if called:
                        return None
                    return self.types.type(found[1].consts.get(found[2]), self.types.scope(found[1], [], None, None))
        return None

    def literal(self, found):
        cursor = self.cursor
        how = found[0] if isinstance(found, tuple) else None
        kind = found[1] if how == "type" else FOREIGN if how == "std" else None
        if how == "variant":
            kind = self.types.of_declared(found[1], ())
            fields = found[1].variants[found[2]]
            wanted = self.types.of_variant(kind, found[2])
        else:
            fields = kind[1].fields if kind and kind[0] == "own" else {}
            wanted = {name: self.types.field(kind, name) for name in fields} if fields else {}
        if kind and kind[0] == "own":
            # With the names of the generics in place, so that the values say what they are.
            scope = self.types.scope_of_type(kind[1])
            wanted = {name: self.types.type(written, scope) for name, written in fields.items()}
        arguments = {}
        end = cursor.close()
        cursor.at += 1
        while cursor.at < end:
            cursor.attributes()
            if cursor.take(".."):
                self.expression()
                continue
            name = cursor.next()
            if cursor.take(":"):
                ahead = 1 if cursor.peek() == "move" else 0
                if cursor.peek(ahead) in ("|", "||"):
                    cursor.at += ahead
                    expected = wanted.get(name)
                    value = self.closure(expected[1] if expected and expected[0] == "fn" else ())
                else:
                    value = self.expression()
            else:
                names = self.local(name)
                value = names[name] if names else None
            unify(wanted.get(name), value, arguments)
            cursor.take(",")
        cursor.at = end + 1
        if kind and kind[0] == "own" and kind[2]:
            names = dict.fromkeys(name for name, _ in kind[1].generics)
            given = tuple(arguments.get(name) or before for name, before in zip(names, kind[2]))
            return ("own", kind[1], given)
        return kind

    def constructed(self, variant, called):
        kind = self.types.of_declared(variant[1], ())
        fields = tuple(self.types.of_variant(kind, variant[2]).values())
        if called:
            self.arguments(fields)
            return kind
        return ("fn", fields, kind) if fields else kind

    def function_value(self, function, arguments, given, called):
        if called:
            return self.call(function, arguments, given, None, own=True)
        # Passed on: what gets it will call it.
        self.calls.note(self.function, function)
        scope = self.types.scope_of(function)
        params = [self.types.type(written, scope) for _, written in function.params]
        if function.takes_self:
            params.insert(0, scope.self_type)
        kind = ("fn", tuple(params), self.types.type(function.result, scope))
        return substitute(kind, arguments)

    def member(self, base, name, given, called):
        """`Type::name`."""
        if base and base[0] == "own" or base and base[0] in ("param", "traits", "std", "tuple"):
            found = self.types.method(base, name)
            if found:
                function, arguments = found
                if base[0] == "traits" and called:
                    return self.of_trait(function, given)
                return self.function_value(function, arguments, given, called)
            kind = self.constant(base, name)
            if kind is not None and not called:
                return kind
            if name == "ALL" and not called:
                # As the workspace's macros declare it.
                return ("std", "Vec", (base,))
        if called:
            self.calls.counts["other"] += 1
            kinds = self.arguments()
            if name in ("default", "new", "from", "with_capacity", "clone"):
                return base if base and base[0] != "traits" else None
            return ("std", "Result", (base, None)) if name in ("try_from", "from_str", "decode") and base else None
        if base and base[0] == "std" and not called:
            return base if name.isupper() else None
        return None

    def constant(self, base, name):
        if base[0] != "own":
            return None
        for block in base[1].impls:
            if name in block.types:
                return self.types.type(block.types[name], self.types.scope_of_block(block))
        return None

    def of_trait(self, function, given):
        """`Trait::method(value)`: the method of the value's type."""
        kinds = self.arguments()
        found = self.types.method(kinds[0], function.name) if function.takes_self and kinds else None
        function, arguments = found or (function, {})
        self.calls.note(self.function, function)
        return self.result(function, arguments, given)

    def of_others(self, segments, given, called):
        """A function or value of another crate."""
        last, before = segments[-1], segments[-2] if len(segments) > 1 else ""
        if not called:
            if last == "None":
                return optional(None)
            if last == "Some":
                return ("fn", (None,), optional(None))
            return None if last[0].islower() or last in ("Ok", "Err") else FOREIGN
        self.calls.counts["other"] += 1
        kinds = self.arguments()
        first = kinds[0] if kinds else None
        match last:
            case "Some":
                return optional(first)
            case "Ok":
                return ("std", "Result", (first, None))
            case "Err":
                return ("std", "Result", (None, first))
            case "take" | "replace" if before == "mem":
                return first
            case "clone" | "make_mut":
                return first
            case "get_mut" if before in ("Arc", "Rc"):
                return optional(first)
            case "try_unwrap" | "into_inner" if before in ("Arc", "Rc"):
                return ("std", "Option" if last == "into_inner" else "Result", (first,))
            case "new" | "pin" | "from" if before in ("Box", "Arc", "Rc", "Pin"):
                return first
            case "new" if before in ("Mutex", "RefCell", "Cell", "RwLock", "Reverse", "Wrapping", "Saturating"):
                return ("std", before, (first,))
            case "new" | "with_capacity" | "default" | "from_iter" | "from" if before:
                return of_others(before, tuple(given) if given else ())
            case "once" | "repeat" | "from_fn" | "repeat_with" | "successors" | "once_with":
                return ("std", "Iter", (first if last in ("once", "repeat") else argument(result_of(first)),))
            case "zip":
                return ("std", "Iter", (("tuple", tuple(self.types.element(kind) for kind in kinds)),))
            case "from_ref" | "from_mut":
                return ("std", "Vec", (first,))
            case "min" | "max":
                return first
        return FOREIGN if all(map(is_foreign, kinds)) else None

    def macro(self, name):
        cursor = self.cursor
        cursor.expect("!")
        end = cursor.close()
        at = cursor.at + 1
        kinds = []
        if name == "matches":
            self.matches(at, end)
        elif name != "macro_rules":
            while at < end:
                stop = at
                while stop < end and cursor.tokens[stop] not in (",", ";", "=>"):
                    stop = cursor.pairs[stop] + 1 if cursor.tokens[stop] in ("(", "[", "{") else stop + 1
                kinds.append(self.macro_part(at, stop))
                at = stop + 1
        cursor.at = end + 1
        if name == "vec":
            return ("std", "Vec", (next(iter(kinds), None),))
        if name in ("matches", "assert", "debug_assert"):
            return BOOL
        if name in ("panic", "unreachable", "todo", "bail"):
            return NEVER
        return ("std", "String", ()) if name == "format" else None

    def matches(self, at, end):
        here = self.cursor
        self.cursor = here.part(at, end)
        self.locals.append({})
        kind = self.expression()
        self.cursor.expect(",")
        self.pattern(kind)
        if self.cursor.take("if"):
            self.expression()
        self.locals.pop()
        self.cursor = here

    def macro_part(self, at, stop):
        """An argument of a macro: `expression`, `name = expression`, `%expression`. Others are no expressions."""
        here = self.cursor
        while at < stop and (here.tokens[at] in ("%", "?") or is_name(here.tokens[at]) and self.is_field(at, stop)):
            while here.tokens[at] not in ("%", "?", "="):
                at += 1
            at += 1
        if at >= stop:
            return None
        self.cursor = here.part(at, stop)
        try:
            if here.tokens[at] == "{" and here.pairs[at] == stop - 1:
                # Fields of a log line.
                inner, kind = at + 1, None
                while inner < stop - 1:
                    end = inner
                    while end < stop - 1 and here.tokens[end] != ",":
                        end = here.pairs[end] + 1 if here.tokens[end] in ("(", "[", "{") else end + 1
                    self.macro_part(inner, end)
                    inner = end + 1
                return kind
            return self.expression()
        except SyntaxProblem as problem:
            if "(" in here.tokens[at:stop]:
                self.calls.problems.append(f"{self.function.file}: {self.function}: in a macro: {problem}")
            return None
        finally:
            self.cursor = here

    def is_field(self, at, stop):
        """Whether the argument of a macro begins with `name =`."""
        tokens = self.cursor.tokens
        while at + 2 < stop and tokens[at + 1] == "." and is_name(tokens[at + 2]):
            at += 2
        return at + 1 < stop and tokens[at + 1] == "="
