"""Patterns: which names they bind, to which types."""

from .standard import argument
from .tokens import is_name
from .types import FOREIGN


# Variants of the standard library, and which argument of their type they have.
WITH_VALUE = {"Some": 0, "Ok": 0, "Err": 1, "Ready": 0, "Break": 0, "Continue": 1, "Reverse": 0}


class Fields(dict):
    """The fields of a type of another crate: all of one type."""

    def __init__(self, kind):
        self.kind = kind

    def get(self, name, default=None):
        return self.kind

    def values(self):
        return [self.kind] * 8


class Patterns:
    """The part of a body's reader that reads patterns."""

    def skip_pattern(self):
        cursor = self.cursor
        while cursor.peek() not in ("=", ":", ";", "in", "if", "=>", ""):
            if cursor.peek() in ("(", "[", "{"):
                cursor.skip_group()
            else:
                cursor.at += 1

    def bind_pattern(self, part, kind):
        here = self.cursor
        self.cursor = here.part(*part)
        self.pattern(kind)
        self.cursor = here

    def pattern(self, kind):
        cursor = self.cursor
        cursor.take("|")
        self.one_pattern(kind)
        while cursor.take("|"):
            self.one_pattern(kind)

    def one_pattern(self, kind):
        cursor = self.cursor
        while cursor.take("&", "&&", "mut", "ref", "box"):
            pass
        token = cursor.peek()
        if token in ("_", ""):
            cursor.at += 1
        elif token in ("..", "..=", "..."):
            cursor.at += 1
            if is_name(cursor.peek()) or cursor.peek()[:1].isdigit():
                self.one_pattern(None)
        elif token == "(":
            self.tuple_pattern(kind)
        elif token == "[":
            end = cursor.close()
            cursor.at += 1
            while cursor.at < end:
                rest = is_name(cursor.peek()) and cursor.peek(1) == "@"
                self.pattern(kind if rest else self.types.element(kind))
                cursor.take(",")
            cursor.at = end + 1
        elif is_name(token) or token in ("::", "<"):
            self.named_pattern(kind)
        else:
            cursor.take("-")
            cursor.at += 1
        if cursor.peek() in ("..=", "..", "..."):
            cursor.at += 1
            if cursor.peek() not in (")", "]", "=>", "if", "|", ",", "", "="):
                self.one_pattern(None)

    def tuple_pattern(self, kind):
        cursor = self.cursor
        end = cursor.close()
        parts = kind[1] if kind and kind[0] == "tuple" else (FOREIGN,) * 8 if kind == FOREIGN else ()
        places = self.places(end)
        cursor.at += 1
        if places == 1 and cursor.tokens[end - 1] != ",":
            self.pattern(kind)
        else:
            self.sequence(end, places, parts)
        cursor.at = end + 1

    def places(self, end):
        """How many parts the group here has."""
        cursor = self.cursor
        at, count = cursor.at + 1, 0
        if at < end:
            count = 1
        while at < end:
            if cursor.tokens[at] in ("(", "[", "{"):
                at = cursor.pairs[at]
            elif cursor.tokens[at] == "," and at + 1 < end:
                count += 1
            at += 1
        return count

    def sequence(self, end, places, parts):
        cursor, at = self.cursor, 0
        while cursor.at < end:
            if cursor.peek() == ".." and cursor.peek(1) in (",", ")"):
                cursor.at += 1
                at = max(0, len(parts) - (places - at - 1))
            else:
                self.pattern(parts[at] if at < len(parts) else None)
                at += 1
            cursor.take(",")

    def named_pattern(self, kind):
        cursor = self.cursor
        token = cursor.peek()
        if cursor.peek(1) not in ("::", "(", "{", "!", "<") and token != "<" and (token[0].islower() or token[0] == "_"):
            cursor.at += 1
            if token not in ("true", "false"):
                self.bind(token, kind)
            if cursor.take("@"):
                self.one_pattern(kind)
            return
        path = self.value_path()
        fields = self.fields_of(path, kind)
        if cursor.peek() == "(":
            end = cursor.close()
            places = self.places(end)
            cursor.at += 1
            self.sequence(end, places, list(fields.values()))
            cursor.at = end + 1
        elif cursor.peek() == "{":
            end = cursor.close()
            cursor.at += 1
            while cursor.at < end:
                cursor.attributes()
                if cursor.take(".."):
                    break
                while cursor.take("ref", "mut", "box"):
                    pass
                name = cursor.next()
                if cursor.take(":"):
                    self.pattern(fields.get(name))
                else:
                    self.bind(name, fields.get(name))
                cursor.take(",")
            cursor.at = end + 1
        elif cursor.peek() == "!":
            cursor.at += 1
            cursor.skip_group()

    def fields_of(self, path, kind):
        """The types of what a pattern takes apart, by name."""
        segments, _ = path
        last = segments[-1]
        found = self.resolved(segments)
        if isinstance(found, tuple) and found[0] == "std" or found is None:
            if last in WITH_VALUE:
                return Fields(kind if kind == FOREIGN else argument(kind, WITH_VALUE[last]))
            return Fields(kind if last in ("Occupied", "Vacant") else FOREIGN)
        if isinstance(found, tuple) and found[0] == "variant":
            base = kind if kind and kind[0] == "own" and kind[1] is found[1] else self.types.of_declared(found[1], ())
            return self.types.of_variant(base, found[2])
        if isinstance(found, tuple) and found[0] == "type":
            found = found[1]
            if found and found[0] == "own":
                base = kind if kind and kind[0] == "own" and kind[1] is found[1] else found
                return {name: self.types.field(base, name) for name in base[1].fields}
        return {}
