"""Rust's tokens as strings, and a cursor over them. A string begins with `"`, a character is `''`; comments are left out."""

import re

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<raw>(?:br|cr|r)(?P<hashes>\#*)".*?"(?P=hashes))
    |(?P<string>[bc]?"(?:[^"\\]|\\.)*")
    |(?P<char>b?'(?:[^'\\]|\\(?:x..|u\{[^}]*\}|.))')
    |(?P<other>'\w+|\d\w*(?:\.\d\w*)?|(?:r\#)?[A-Za-z_]\w*
      |\.\.=|\.\.\.|\.\.|::|->|=>|==|!=|<=|>=|&&|\|\||[-+*/%^|&]=|.)""",
    re.DOTALL | re.VERBOSE,
)
TESTING = {"test", '"inspection"'}
CLOSING = {"(": ")", "[": "]", "{": "}"}


def tokens_of(text):
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "other":
            found.append(match[kind].removeprefix("r#"))
        elif kind == "char":
            found.append("''")
        elif kind != "skip":
            found.append(match[kind][match[kind].index('"') :])
    return found


def pairs_of(tokens):
    """For each opening bracket the place of its closing one."""
    pairs, open_at = {}, []
    for at, token in enumerate(tokens):
        if token in CLOSING:
            open_at.append(at)
        elif token in (")", "]", "}") and open_at:
            pairs[open_at.pop()] = at
    return pairs


def is_name(token):
    return token[:1].isalpha() or token[:1] == "_"


class SyntaxProblem(Exception):
    pass


class Cursor:
    """A place in a file's tokens."""

    def __init__(self, tokens, pairs, at=0, end=None):
        self.tokens, self.pairs, self.at = tokens, pairs, at
        self.end = len(tokens) if end is None else end

    def part(self, at, end):
        return Cursor(self.tokens, self.pairs, at, end)

    def peek(self, ahead=0):
        at = self.at + ahead
        return self.tokens[at] if at < self.end else ""

    def next(self):
        token = self.peek()
        if not token:
            raise SyntaxProblem("ends early")
        self.at += 1
        return token

    def take(self, *tokens):
        if self.peek() in tokens and self.at < self.end:
            self.at += 1
            return True
        return False

    def expect(self, token):
        if not self.take(token):
            raise SyntaxProblem(f"{token} expected, not {' '.join(self.tokens[self.at : self.at + 8])}")

    def close(self):
        """Where the bracket here closes."""
        return self.pairs.get(self.at, self.end)

    def skip_group(self):
        self.at = self.close() + 1

    def attributes(self):
        """Skips attributes; whether one says that what follows is there only in tests."""
        hidden = False
        while self.peek() == "#":
            self.at += 2 if self.peek(1) == "!" else 1
            hidden |= is_test(self.tokens[self.at + 1 : self.close()])
            self.skip_group()
        return hidden

    # Types, as they are written: ("path", segments, arguments, bindings), ("tuple", types), ("list", type), ("fn", types, type),
    # ("bounds", paths), ("as", type, segments) and `None` for what has no name.

    def type(self):
        token = self.peek()
        if token in ("&", "&&"):
            self.at += 1
            if self.peek().startswith("'"):
                self.at += 1
            self.take("mut")
            return self.type()
        if token == "*":
            self.at += 2
            return self.type()
        if token == "(":
            end = self.close()
            self.at += 1
            types = []
            comma = False
            while self.at < end:
                types.append(self.type())
                comma = self.take(",")
            self.at = end + 1
            return types[0] if len(types) == 1 and not comma else ("tuple", types)
        if token == "[":
            end = self.close()
            self.at += 1
            element = self.type()
            self.at = end + 1
            return ("list", element)
        if token in ("dyn", "impl"):
            self.at += 1
            return ("bounds", self.bounds())
        if token == "!" or token == "_":
            self.at += 1
            return None
        if token == "for" or token in ("unsafe", "extern", "fn"):
            if token == "for":
                self.at += 1
                self.generics()
            while self.take("unsafe", "extern") or self.peek().startswith('"'):
                self.at += self.peek().startswith('"')
            if self.peek() == "fn":
                self.at += 1
                return self.signature()
        if token == "<":
            self.at += 1
            base = self.type()
            if self.take("as"):
                self.type()
            self.expect(">")
            segments = []
            while self.peek() == "::" and is_name(self.peek(1)):
                self.at += 1
                segments.append(self.next())
            return ("as", base, segments)
        return self.path()

    def signature(self):
        """`(A, B) -> C` of a function's type or trait."""
        end = self.close()
        self.at += 1
        types = []
        while self.at < end:
            if is_name(self.peek()) and self.peek(1) == ":":
                self.at += 2
            types.append(self.type())
            self.take(",")
        self.at = end + 1
        return ("fn", types, self.type() if self.take("->") else ("tuple", []))

    def path(self):
        self.take("::")
        segments, arguments, bindings = [], [], {}
        while True:
            if not is_name(self.peek()):
                raise SyntaxProblem(f"a type expected, not {' '.join(self.tokens[self.at : self.at + 8])}")
            segments.append(self.next())
            if self.peek() == "::" and self.peek(1) == "<":
                self.at += 1
            if self.peek() == "<":
                arguments, bindings = self.arguments()
            elif self.peek() == "(" and segments[-1] in ("Fn", "FnMut", "FnOnce"):
                return self.signature()
            if self.peek() == "::" and is_name(self.peek(1)):
                self.at += 1
                continue
            return ("path", segments, arguments, bindings)

    def arguments(self):
        self.expect("<")
        arguments, bindings = [], {}
        while not self.take(">"):
            token = self.peek()
            if token.startswith("'"):
                self.at += 1
            elif is_name(token) and self.peek(1) == "=":
                self.at += 2
                bindings[token] = self.type()
            elif is_name(token) and self.peek(1) == ":":
                self.at += 2
                bindings[token] = ("bounds", self.bounds())
            elif token == "{":
                self.skip_group()
                arguments.append(None)
            elif not token:
                raise SyntaxProblem("arguments of a type")
            elif token[0].isdigit() or token[0] in ('"', "'", "-"):
                self.at += 1
                arguments.append(None)
            else:
                arguments.append(self.type())
            if not self.take(",") and self.peek() != ">":
                raise SyntaxProblem("arguments of a type")
        return arguments, bindings

    def bounds(self):
        found = []
        while True:
            if self.peek() == "use" and self.peek(1) == "<":
                self.at += 1
                self.generics()
            elif self.peek() == "(":
                end = self.close()
                self.at += 1
                found += self.bounds()
                self.at = end + 1
            elif self.peek().startswith("'"):
                self.at += 1
            elif is_name(self.peek()) or self.peek() in ("?", "::"):
                relaxed = self.take("?")
                self.take("const")
                if self.take("for"):
                    self.generics()
                bound = self.path()
                if not relaxed:
                    found.append(bound)
            if not self.take("+"):
                return found

    def generics(self):
        """`<'a, T: A + B, const N: usize>` as a list of names and bounds."""
        found = []
        if not self.take("<"):
            return found
        while not self.take(">"):
            self.attributes()
            if self.peek().startswith("'"):
                self.at += 1
                if self.take(":"):
                    self.bounds()
            elif self.take("const"):
                found.append((self.next(), []))
                self.expect(":")
                self.type()
            else:
                name = self.next()
                found.append((name, self.bounds() if self.take(":") else []))
            if self.take("="):
                if self.peek() == "{":
                    self.skip_group()
                elif not is_name(self.peek()) and self.peek() not in ("(", "[", "&"):
                    self.at += 1
                else:
                    self.type()
            if not self.take(",") and self.peek() != ">":
                raise SyntaxProblem("generics")
        return found

    def where(self):
        """The bounds after `where`, by the name of what they bound."""
        found = []
        if not self.take("where"):
            return found
        while self.peek() not in ("{", ";", ""):
            if self.peek().startswith("'"):
                self.at += 1
                self.expect(":")
                self.bounds()
            else:
                if self.take("for"):
                    self.generics()
                bound = self.type()
                self.expect(":")
                bounds = self.bounds()
                if bound and bound[0] == "path" and len(bound[1]) == 1:
                    found.append((bound[1][0], bounds))
            self.take(",")
        return found


def is_test(attribute):
    """Whether a `cfg` leaves out what follows it, unless tests or what inspects the program are built."""
    if attribute[:1] != ["cfg"]:
        return attribute[:1] == ["test"]
    return "not" not in attribute and bool(TESTING & set(attribute))
