//! What a build does with a program that is easier to attack than it has to be.

use std::{fs, path::Path, process::Command, time::Duration};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    process::{run, text},
};

use crate::repository;

const LIMIT: Duration = Duration::from_secs(60);

/// Why `deploy/lib.sh` refuses `program`; empty if it does not.
fn refusal(program: &Path) -> String {
    let mut shell = Command::new("bash");
    shell.args(["-euc", ". deploy/lib.sh; is_hardened \"$1\"", "deploy/build"]).arg(program);
    let output = run(shell.current_dir(repository("")), LIMIT);
    assert_eq!(output.status.success(), output.stderr.is_empty(), "{output:?}");
    text(&output.stderr)
}

#[test]
fn a_program_without_a_defence_is_refused() {
    if !needs::met(
        "the defences of a program",
        &[Need::Tool("gcc", "gcc"), Need::Tool("readelf", "binutils")],
    ) {
        return;
    }
    assert_eq!(refusal(binary()), "");
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("program.c"), folder.path().join("program"));
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    for (flags, expected) in [
        (&["-pie", "-Wl,-z,relro,-z,now"][..], None),
        (&["-no-pie", "-Wl,-z,relro,-z,now"], Some("fixed address")),
        (&["-pie", "-Wl,-z,norelro,-z,now"], Some("RELRO")),
        (&["-pie", "-Wl,-z,relro,-z,lazy"], Some("NOW")),
        (&["-pie", "-Wl,-z,relro,-z,now,-z,execstack"], Some("stack is executable")),
        (&["-static", "-nostdlib", "-Wl,-N,-e,main"], Some("writable and executable")),
    ] {
        let mut compiler = Command::new("gcc");
        let output = run(compiler.arg(&source).arg("-o").arg(&program).args(flags), LIMIT);
        assert!(output.status.success(), "{flags:?}: {}", text(&output.stderr));
        let said = refusal(&program);
        assert!(expected.map_or(said.is_empty(), |words| said.contains(words)), "{flags:?}: {said}");
    }
    assert!(refusal(&source).contains("cannot be read"));
}
