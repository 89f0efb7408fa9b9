"""The modules of the workspace's crates, and what they declare: types, functions, imports."""

import tomllib

from .tokens import Cursor, SyntaxProblem, is_name, is_test, pairs_of, tokens_of

THROTTLE = ("path", ["base", "throttle", "Throttle"], [], {})
VISIBILITY = ("pub", "crate", "default", "unsafe", "async", "const", "extern", "safe")


class Module:
    def __init__(self, crate, path, file, parent=None):
        self.crate, self.path, self.file, self.parent = crate, path, file, parent
        # A function and a module may have one name: `values` has functions, `names` the rest, and both have what is imported.
        self.names, self.values, self.globs, self.consts = {}, {}, [], {}
        # A module without a name in the body of a function sees what is around it.
        self.lexical = None


class Type:
    """A struct, enum, union, trait or alias."""

    def __init__(self, kind, name, module, generics=()):
        self.kind, self.name, self.module, self.generics = kind, name, module, list(generics)
        self.fields, self.variants = {}, {}
        self.target, self.above = None, []
        self.methods, self.impls, self.types = {}, [], {}

    def __repr__(self):
        return f"{'::'.join((self.module.crate, *self.module.path))}::{self.name}"


class Impl:
    """A block of methods: for which type, of which trait."""

    def __init__(self, module, generics, target, trait):
        self.module, self.generics, self.target, self.trait = module, generics, target, trait
        self.types, self.functions = {}, []
        # Set when names are resolved; of a trait's own methods, the trait.
        self.owner = None


class Function:
    def __init__(self, name, module, cursor, block):
        self.name, self.module, self.cursor, self.block = name, module, cursor, block
        self.generics, self.params, self.takes_self, self.result, self.body = [], [], False, None, None
        self.self_type = None

    @property
    def file(self):
        return self.module.file

    @property
    def owner(self):
        return self.block.owner if self.block else None

    def __str__(self):
        owner = self.owner
        return f"{owner.name if isinstance(owner, Type) else owner}::{self.name}" if owner else self.name


class Workspace:
    def __init__(self):
        self.crates, self.functions, self.impls, self.problems = {}, [], [], []

    def add_crate(self, root):
        """The crate whose sources are in folder `root`."""
        manifest = root.parent / "Cargo.toml"
        name = tomllib.loads(manifest.read_text())["package"]["name"] if manifest.exists() else root.parent.name
        for file in ("lib.rs", "main.rs"):
            if (root / file).exists():
                crate = name.replace("-", "_")
                module = Module(crate, (), root / file)
                self.crates[crate] = module
                self.read(module, root)
                return module
        return None

    def read(self, module, folder):
        """Reads a module's file; `folder` is where its submodules are."""
        tokens = tokens_of(module.file.read_text())
        Items(self, module, folder, Cursor(tokens, pairs_of(tokens))).items()


class Items:
    """Reads declarations into a module."""

    def __init__(self, workspace, module, folder, cursor, block=None):
        self.workspace, self.module, self.folder, self.cursor, self.block = workspace, module, folder, cursor, block

    def items(self):
        cursor = self.cursor
        while cursor.at < cursor.end:
            before = cursor.at
            try:
                self.item()
            except SyntaxProblem as problem:
                self.workspace.problems.append(f"{self.module.file}: {problem}")
                cursor.at = max(cursor.at, before + 1)

    def attributes(self):
        """Skips attributes: whether what follows is left out, and the path of a module's file."""
        cursor, hidden, path = self.cursor, False, None
        while cursor.peek() == "#":
            cursor.at += 2 if cursor.peek(1) == "!" else 1
            inside = cursor.tokens[cursor.at + 1 : cursor.close()]
            hidden |= is_test(inside)
            if inside[:1] == ["path"]:
                path = inside[2].strip('"')
            cursor.skip_group()
        return hidden, path

    def item(self):
        cursor = self.cursor
        hidden, path = self.attributes()
        while (cursor.peek() in VISIBILITY or cursor.peek().startswith('"')) and not (cursor.peek() == "const" and is_const(cursor)):
            cursor.at += 1
            if cursor.tokens[cursor.at - 1] == "pub" and cursor.peek() == "(":
                cursor.skip_group()
        token = cursor.peek()
        if hidden:
            return self.skip_item()
        match token:
            case "mod":
                self.submodule(path)
            case "use":
                self.use()
            case "struct" | "union":
                self.struct()
            case "enum":
                self.enum()
            case "fn":
                self.function()
            case "impl":
                self.impl()
            case "trait":
                self.trait()
            case "type":
                self.alias()
            case "const" | "static":
                self.const()
            case "macro_rules":
                self.skip_item()
            case _ if is_name(token) and self.is_macro():
                self.macro()
            case _:
                cursor.at += 1
        return None

    def is_macro(self):
        ahead = 1
        while self.cursor.peek(ahead) == "::":
            ahead += 2
        return self.cursor.peek(ahead) == "!"

    def skip_item(self):
        cursor = self.cursor
        is_use = cursor.peek() == "use"
        while cursor.at < cursor.end and cursor.peek() != ";":
            if cursor.peek() in ("(", "[", "{"):
                brace = cursor.peek() == "{"
                cursor.skip_group()
                if brace and not is_use:
                    cursor.take(";")
                    return
                if cursor.peek() == "," and not is_use:
                    return
            elif cursor.peek() == "=":
                # A value: to the semicolon.
                is_use = True
                cursor.at += 1
            else:
                cursor.at += 1
        cursor.at += 1

    def submodule(self, written):
        cursor = self.cursor
        cursor.next()
        name = cursor.next()
        module = Module(self.module.crate, (*self.module.path, name), self.module.file, self.module)
        self.module.names[name] = module
        if cursor.peek() == "{":
            inner = cursor.part(cursor.at + 1, cursor.close())
            Items(self.workspace, module, self.folder / name, inner).items()
            cursor.skip_group()
            return
        cursor.expect(";")
        if written:
            file = self.module.file.parent / written
        else:
            file = next((file for file in (self.folder / f"{name}.rs", self.folder / name / "mod.rs") if file.exists()), None)
        if file is None or not file.exists():
            return
        module.file = file
        self.workspace.read(module, file.parent if written or file.name == "mod.rs" else self.folder / name)

    def use(self):
        self.cursor.next()
        self.tree([])
        self.cursor.take(";")

    def tree(self, before):
        cursor = self.cursor
        path = list(before)
        cursor.take("::")
        while True:
            token = cursor.next()
            if token == "{":
                while not cursor.take("}"):
                    self.tree(path)
                    cursor.take(",")
                return
            if token == "*":
                self.module.globs.append(path)
                return
            path.append(token)
            if not cursor.take("::"):
                break
        whole = path[-1] == "self"
        if whole:
            path.pop()
        name = cursor.next() if cursor.take("as") else path[-1]
        if name != "_":
            self.module.names.setdefault(name, ("use", path))
        if not whole:
            self.module.values.setdefault(name, ("use", path))

    def declare(self, kind):
        cursor = self.cursor
        cursor.next()
        name = cursor.next()
        declared = Type(kind, name, self.module, cursor.generics())
        self.module.names[name] = declared
        return declared

    def struct(self):
        declared = self.declare("struct")
        cursor = self.cursor
        declared.generics += cursor.where()
        if cursor.peek() in ("{", "("):
            declared.fields = self.fields()
        cursor.where()
        cursor.take(";")
        while cursor.peek() in ("tables", "also") and cursor.peek(1) == "{":
            # More fields, in a macro of the workspace.
            cursor.at += 1
            declared.fields |= self.fields()

    def fields(self):
        """The fields of the group here, by name or number."""
        cursor = self.cursor
        end, named = cursor.close(), cursor.peek() == "{"
        cursor.at += 1
        found = {}
        # In a macro of the workspace.
        separator = ";" if named and self.has_semicolon(end) else ","
        while cursor.at < end:
            hidden = cursor.attributes()
            if cursor.take("pub") and cursor.peek() == "(":
                cursor.skip_group()
            name = str(len(found))
            if named:
                name = cursor.next()
                if cursor.take("as"):
                    cursor.next()
            # `throttles!` has fields without a type.
            kind = THROTTLE if named and not cursor.take(":") else cursor.type()
            if not hidden:
                found[name] = kind
            while cursor.at < end and not cursor.take(separator):
                # What a macro of the workspace lets follow a field.
                if cursor.peek() in ("(", "[", "{"):
                    cursor.skip_group()
                else:
                    cursor.at += 1
        cursor.at = end + 1
        return found

    def has_semicolon(self, end):
        at, tokens = self.cursor.at, self.cursor.tokens
        while at < end and tokens[at] != ";":
            at = self.cursor.pairs[at] + 1 if tokens[at] in ("(", "[", "{") else at + 1
        return at < end

    def enum(self):
        declared = self.declare("enum")
        cursor = self.cursor
        declared.generics += cursor.where()
        if cursor.peek() != "{":
            raise SyntaxProblem("an enum without variants")
        end = cursor.close()
        cursor.at += 1
        while cursor.at < end:
            cursor.attributes()
            name = cursor.next()
            declared.variants[name] = self.fields() if cursor.peek() in ("{", "(") else {}
            while cursor.at < end and not cursor.take(","):
                cursor.at += 1
        cursor.at = end + 1

    def function(self):
        cursor = self.cursor
        cursor.next()
        function = Function(cursor.next(), self.module, cursor, self.block)
        function.generics = cursor.generics()
        end = cursor.close()
        cursor.expect("(")
        while cursor.at < end:
            cursor.attributes()
            start = cursor.at
            while cursor.at < end and cursor.peek() not in (":", ","):
                if cursor.peek() in ("(", "[", "{"):
                    cursor.skip_group()
                else:
                    cursor.at += 1
            pattern = (start, cursor.at)
            kind = cursor.type() if cursor.take(":") else None
            if "self" in cursor.tokens[pattern[0] : pattern[1]]:
                function.takes_self, function.self_type = True, kind
            else:
                function.params.append((pattern, kind))
            cursor.take(",")
        cursor.at = end + 1
        function.result = cursor.type() if cursor.take("->") else ("tuple", [])
        function.generics = function.generics + cursor.where()
        if cursor.peek() == "{":
            function.body = (cursor.at, cursor.close())
            cursor.skip_group()
        else:
            cursor.take(";")
        self.workspace.functions.append(function)
        if self.block is None:
            self.module.values[function.name] = function
        else:
            self.block.functions.append(function)

    def impl(self):
        cursor = self.cursor
        cursor.next()
        generics = cursor.generics()
        cursor.take("const")
        negative = cursor.take("!")
        target, trait = cursor.type(), None
        if cursor.take("for"):
            target, trait = cursor.type(), target
        generics = generics + cursor.where()
        block = Impl(self.module, generics, target, trait)
        if not negative:
            self.workspace.impls.append(block)
        self.members(block)

    def members(self, block):
        cursor = self.cursor
        inner = cursor.part(cursor.at + 1, cursor.close())
        Items(self.workspace, self.module, self.folder, inner, block).items()
        cursor.skip_group()

    def trait(self):
        declared = self.declare("trait")
        cursor = self.cursor
        if cursor.take(":"):
            declared.above = cursor.bounds()
        declared.generics += cursor.where()
        block = Impl(self.module, declared.generics, None, None)
        block.owner = declared
        self.members(block)
        declared.types = block.types
        for function in block.functions:
            declared.methods.setdefault(function.name, []).append(function)

    def alias(self):
        cursor = self.cursor
        if self.block is not None:
            cursor.next()
            name = cursor.next()
            cursor.generics()
            if cursor.take(":"):
                self.block.types[name] = ("bounds", cursor.bounds())
            if cursor.take("="):
                self.block.types[name] = cursor.type()
        else:
            declared = self.declare("alias")
            cursor.expect("=")
            declared.target = cursor.type()
        while cursor.at < cursor.end and not cursor.take(";"):
            cursor.at += 1

    def const(self):
        cursor = self.cursor
        cursor.next()
        cursor.take("mut")
        name = cursor.next()
        kind = cursor.type() if cursor.take(":") else None
        while cursor.at < cursor.end and not cursor.take(";"):
            if cursor.peek() in ("(", "[", "{"):
                cursor.skip_group()
            else:
                cursor.at += 1
        if self.block is None:
            self.module.consts[name] = kind
            self.module.names[name] = ("const", self.module, name)
        else:
            self.block.types[name] = kind

    def macro(self):
        """What a macro of the workspace declares has the form of what it makes, more or less."""
        cursor = self.cursor
        while cursor.peek() not in ("(", "[", "{"):
            cursor.next()
        inner = cursor.part(cursor.at + 1, cursor.close())
        problems = len(self.workspace.problems)
        Items(self.workspace, self.module, self.folder, inner, self.block).items()
        del self.workspace.problems[problems:]
        cursor.skip_group()
        cursor.take(";")


def is_const(cursor):
    """Whether `const` here begins a constant, not a function."""
    return cursor.peek(1) not in ("fn", "unsafe", "async", "extern")
