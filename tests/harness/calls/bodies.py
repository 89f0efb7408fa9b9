"""Reads the bodies of functions: which function each call in them takes."""

from .items import Items, Module, Type
from .paths import Paths
from .patterns import Patterns
from .standard import BOOL, NUMBER, TEXT, argument, is_foreign, result_of
from .tokens import Cursor, SyntaxProblem, is_name
from .types import FOREIGN, MAPS, NEVER, UNIT, merged

RANGE = ("std", "Iter", (NUMBER,))
ASSIGNING = {"=", "+=", "-=", "*=", "/=", "%=", "^=", "|=", "&="}
COMPARING = {"==", "!=", "<", ">", "<=", ">=", "&&", "||"}
BINARY = ASSIGNING | COMPARING | {"+", "-", "*", "/", "%", "^", "|", "&", "..", "..="}
ITEMS = {"fn", "struct", "enum", "impl", "trait", "use", "mod", "static", "macro_rules", "type"}
BLOCKS = {"if", "match", "loop", "while", "for", "unsafe", "{"}
AFTER_RANGE = {")", "]", "}", ",", ";", "=>", "", "{"}


class Calls:
    """The calls of a crate: which function calls which, and what is not known of the rest."""

    def __init__(self, types, crate):
        self.types, self.crate = types, crate
        self.edges = {}
        self.counts = {"own": 0, "other": 0, "by name": 0, "unknown": 0}
        self.unknown, self.guessed, self.problems = [], [], []

    def note(self, caller, callee):
        self.counts["own"] += 1
        if callee.module.crate == self.crate:
            self.edges.setdefault(caller, set()).add(callee)

    def read(self, functions):
        for function in functions:
            if function.body and function.module.crate == self.crate:
                try:
                    Body(self, function).read()
                except (SyntaxProblem, RecursionError) as problem:
                    self.problems.append(f"{function.file}: {function}: {problem!r}")


class Body(Patterns, Paths):
    def __init__(self, calls, function):
        self.calls, self.types, self.function = calls, calls.types, function
        self.scope = self.types.scope_of(function)
        source = function.cursor
        self.cursor = Cursor(source.tokens, source.pairs, function.body[0], function.body[1] + 1)
        self.module = function.module
        self.locals = [{}]

    def read(self):
        if self.function.takes_self:
            self.bind("self", self.scope.self_type)
        for (start, end), written in self.function.params:
            here = self.cursor
            self.cursor = here.part(start, end)
            self.pattern(self.types.type(written, self.scope))
            self.cursor = here
        self.block()

    # Locals.

    def bind(self, name, kind):
        self.locals[-1][name] = kind

    def local(self, name):
        for names in reversed(self.locals):
            if name in names:
                return names
        return None

    def written_type(self):
        kind = self.cursor.type()
        module, self.scope.module = self.scope.module, self.module
        try:
            return self.types.type(kind, self.scope)
        finally:
            self.scope.module = module

    # Statements.

    def block(self):
        """A block: the type of its last expression."""
        cursor = self.cursor
        end = cursor.close()
        cursor.expect("{")
        self.locals.append({})
        module = self.module
        last = UNIT
        while cursor.at < end:
            last = self.statement(end)
        self.module = module
        self.locals.pop()
        cursor.at = end + 1
        return last

    def statement(self, end):
        cursor = self.cursor
        if cursor.take(";"):
            return UNIT
        if cursor.peek() == "#":
            if cursor.attributes():
                self.skip_statement(end)
                return UNIT
            return None
        token = cursor.peek()
        if token == "let":
            self.let()
            return UNIT
        after = cursor.peek(1)
        if token in ITEMS or token == "const" and after != "{" or token in ("async", "unsafe") and after in ("fn", "impl"):
            self.item()
            return UNIT
        blocklike = token in BLOCKS or token.startswith("'") and cursor.peek(1) == ":"
        if blocklike:
            kind = self.primary(token, True)
            if cursor.peek() in (".", "?"):
                kind = self.binary(self.postfix(kind), True)
        else:
            kind = self.expression()
        if cursor.take(";"):
            return NEVER if kind == NEVER else UNIT
        if cursor.at < end and not blocklike and cursor.tokens[cursor.at - 1] != "}":
            raise SyntaxProblem(f"a statement goes on with {' '.join(cursor.tokens[cursor.at : cursor.at + 8])}")
        return kind

    def skip_statement(self, end):
        cursor = self.cursor
        while cursor.at < end and not cursor.take(";"):
            if cursor.peek() in ("(", "[", "{"):
                brace = cursor.peek() == "{"
                cursor.skip_group()
                if brace and cursor.peek() not in (".", ";", "else"):
                    return
            else:
                cursor.at += 1

    def item(self):
        """A declaration in a body, in a module of its own that sees what is around it."""
        cursor, around = self.cursor, self.module
        module = Module(around.crate, around.path, around.file, around.parent)
        module.lexical = around
        workspace = self.types.workspace
        functions, impls = len(workspace.functions), len(workspace.impls)
        Items(workspace, module, around.file.parent, cursor).item()
        for block in workspace.impls[impls:]:
            self.types.place(block)
        self.module = module
        for function in workspace.functions[functions:]:
            if function.body:
                Body(self.calls, function).read()
        del workspace.functions[functions:], workspace.impls[impls:]

    def let(self):
        cursor = self.cursor
        cursor.expect("let")
        start = cursor.at
        self.skip_pattern()
        pattern = (start, cursor.at)
        kind = self.written_type() if cursor.take(":") else None
        if cursor.take("="):
            value = self.expression()
            kind = merged(kind, value)
            if cursor.take("else"):
                self.block()
        self.bind_pattern(pattern, kind)
        cursor.take(";")

    # Expressions.

    def expression(self, struct=True):
        return self.binary(self.operand(struct), struct)

    def binary(self, kind, struct):
        cursor = self.cursor
        while True:
            token = cursor.peek()
            if token == "as":
                cursor.at += 1
                kind = self.written_type()
                continue
            if token not in BINARY or token == "=" and cursor.peek(1) == ">":
                return kind
            place = cursor.at - 1
            cursor.at += 1
            while token in ("<", ">") and cursor.peek() in ("<", ">", "<=", ">="):
                # A shift.
                cursor.at += 1
            if token in ("..", "..="):
                kind = RANGE
                if cursor.peek() in AFTER_RANGE and (cursor.peek() != "{" or not struct):
                    continue
                self.operand(struct)
                continue
            other = self.operand(struct)
            if token == "=":
                name = cursor.tokens[place]
                names = self.local(name) if is_name(name) and cursor.tokens[place - 1] != "." else None
                if names is not None and names[name] is None:
                    names[name] = other
                kind = UNIT
            elif token in ASSIGNING:
                kind = UNIT
            elif token in COMPARING:
                kind = BOOL
            elif kind is None:
                kind = other

    def operand(self, struct):
        cursor = self.cursor
        token = cursor.peek()
        match token:
            case "&" | "&&":
                cursor.at += 1
                if cursor.peek() == "raw" and cursor.peek(1) in ("const", "mut"):
                    cursor.at += 1
                cursor.take("mut", "const")
                return self.operand(struct)
            case "*" | "-" | "!":
                cursor.at += 1
                return self.operand(struct)
            case ".." | "..=":
                cursor.at += 1
                if cursor.peek() not in AFTER_RANGE or cursor.peek() == "{" and struct:
                    self.operand(struct)
                return RANGE
            case "|" | "||":
                return self.closure(())
            case "move" | "static":
                cursor.at += 1
                return self.operand(struct)
            case "async":
                cursor.at += 1
                cursor.take("move")
                if cursor.peek() in ("|", "||"):
                    return self.closure(())
                return self.postfix(self.block())
            case "return" | "break" | "continue" | "yield":
                cursor.at += 1
                if cursor.peek().startswith("'") and cursor.peek() != "''":
                    cursor.at += 1
                if cursor.peek() not in AFTER_RANGE or cursor.peek() == "{" and struct:
                    self.expression(struct)
                return NEVER
            case "let":
                return self.let_condition()
        return self.postfix(self.primary(token, struct))

    def let_condition(self):
        cursor = self.cursor
        cursor.expect("let")
        start = cursor.at
        self.skip_pattern()
        pattern = (start, cursor.at)
        cursor.expect("=")
        self.bind_pattern(pattern, self.operand(False))
        return BOOL

    def primary(self, token, struct):
        cursor = self.cursor
        if token == "(":
            end = cursor.close()
            cursor.at += 1
            kinds, comma = [], False
            while cursor.at < end:
                kinds.append(self.expression())
                comma = cursor.take(",")
            cursor.at = end + 1
            return kinds[0] if len(kinds) == 1 and not comma else ("tuple", tuple(kinds))
        if token == "[":
            end = cursor.close()
            cursor.at += 1
            kinds = []
            while cursor.at < end:
                kinds.append(self.expression())
                cursor.take(",", ";")
            cursor.at = end + 1
            return ("std", "Vec", (next((kind for kind in kinds if kind), None),))
        if token == "{":
            return self.block()
        if token.startswith("'") and token != "''":
            cursor.at += 2
            return self.primary(cursor.peek(), struct)
        match token:
            case "unsafe" | "const":
                cursor.at += 1
                return self.block()
            case "if":
                return self.if_else()
            case "match":
                return self.match()
            case "loop":
                cursor.at += 1
                self.block()
                return None
            case "while":
                cursor.at += 1
                self.locals.append({})
                self.expression(False)
                self.block()
                self.locals.pop()
                return UNIT
            case "for":
                return self.loop()
            case "true" | "false":
                cursor.at += 1
                return BOOL
            case "''":
                cursor.at += 1
                return ("std", "char", ())
        if token[:1].isdigit() or token[:1] == '"':
            cursor.at += 1
            return TEXT if token[0] == '"' else NUMBER
        if is_name(token) or token in ("::", "<"):
            return self.named(struct)
        raise SyntaxProblem(f"an expression expected, not {' '.join(cursor.tokens[cursor.at : cursor.at + 8])}")

    def if_else(self):
        cursor = self.cursor
        cursor.expect("if")
        self.locals.append({})
        self.expression(False)
        kind = self.block()
        self.locals.pop()
        if cursor.take("else"):
            kind = merged(kind, self.if_else() if cursor.peek() == "if" else self.block())
        return kind

    def match(self):
        cursor = self.cursor
        cursor.expect("match")
        value = self.expression(False)
        end = cursor.close()
        cursor.expect("{")
        kind = NEVER
        while cursor.at < end:
            cursor.attributes()
            self.locals.append({})
            self.pattern(value)
            if cursor.take("if"):
                self.expression()
            cursor.expect("=>")
            arm = self.block() if cursor.peek() == "{" else self.expression()
            kind = merged(kind, arm)
            self.locals.pop()
            cursor.take(",")
        cursor.at = end + 1
        return kind

    def loop(self):
        cursor = self.cursor
        cursor.expect("for")
        start = cursor.at
        self.skip_pattern()
        pattern = (start, cursor.at)
        cursor.expect("in")
        value = self.expression(False)
        self.locals.append({})
        self.bind_pattern(pattern, self.types.element(value))
        self.block()
        self.locals.pop()
        return UNIT

    def closure(self, expected):
        cursor = self.cursor
        self.locals.append({})
        params = []
        if not cursor.take("||"):
            cursor.expect("|")
            while not cursor.take("|"):
                start = cursor.at
                while cursor.peek() not in (":", ",", "|"):
                    if cursor.peek() in ("(", "[", "{"):
                        cursor.skip_group()
                    else:
                        cursor.next()
                pattern = (start, cursor.at)
                kind = expected[len(params)] if len(params) < len(expected) else None
                if cursor.take(":"):
                    kind = merged(self.written_type(), kind)
                self.bind_pattern(pattern, kind)
                params.append(kind)
                cursor.take(",")
        written = self.written_type() if cursor.take("->") else None
        kind = merged(written, self.expression())
        self.locals.pop()
        return ("fn", tuple(params), kind)

    def arguments(self, expected=()):
        """The arguments of a call: their types. `expected` are those of the parameters."""
        cursor = self.cursor
        end = cursor.close()
        cursor.expect("(")
        kinds = []
        while cursor.at < end:
            cursor.attributes()
            wanted = expected[len(kinds)] if len(kinds) < len(expected) else None
            ahead = 0
            while cursor.peek(ahead) in ("move", "&", "mut", "async"):
                ahead += 1
            if cursor.peek(ahead) in ("|", "||"):
                cursor.at += ahead
                kinds.append(self.closure(wanted[1] if wanted and wanted[0] == "fn" else ()))
            else:
                kinds.append(self.expression())
            if not cursor.take(",") and cursor.at < end:
                raise SyntaxProblem(f"arguments go on with {' '.join(cursor.tokens[cursor.at : cursor.at + 8])}")
        cursor.at = end + 1
        return kinds

    def postfix(self, kind):
        cursor = self.cursor
        while True:
            token = cursor.peek()
            if token == ".":
                cursor.at += 1
                name = cursor.next()
                if name == "await":
                    continue
                if not is_name(name):
                    for part in name.split("."):
                        kind = self.types.field(kind, part)
                    continue
                given = None
                if cursor.peek() == "::":
                    cursor.at += 1
                    given = self.turbofish()
                kind = self.method(kind, name, given) if cursor.peek() == "(" else self.types.field(kind, name)
            elif token == "?":
                cursor.at += 1
                kind = FOREIGN if is_foreign(kind) else argument(kind) if kind and kind[0] == "std" else None
            elif token == "(":
                expected = kind[1] if kind and kind[0] == "fn" else ()
                self.arguments(expected)
                kind = result_of(kind)
            elif token == "[":
                end = cursor.close()
                cursor.at += 1
                at = self.expression()
                cursor.at = end + 1
                if at != RANGE:
                    kind = self.indexed(kind)
            else:
                return kind

    def turbofish(self):
        written, _ = self.cursor.arguments()
        module, self.scope.module = self.scope.module, self.module
        kinds = [self.types.type(each, self.scope) for each in written]
        self.scope.module = module
        return kinds

    def indexed(self, kind):
        if kind and kind[0] == "std":
            return FOREIGN if is_foreign(kind) and not kind[2] else argument(kind, 1) if kind[1] in MAPS else argument(kind)
        if kind and kind[0] == "own":
            found = self.types.method(kind, "index")
            if found:
                self.calls.note(self.function, found[0])
                return self.result(*found)
            under = self.types.peeled(kind)
            return self.indexed(under) if under[0] == "std" else None
        return None
