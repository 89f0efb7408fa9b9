//! Names the profile that the binary is built with, which `culvert demo` says: figures depend on it.

use std::{env, ffi::OsStr, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `PROFILE` names only the profile that this one inherits from; OUT_DIR is …/target/<profile>/build/<package>/out.
    let out = env::var("OUT_DIR").unwrap_or_default();
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name).and_then(OsStr::to_str);
    println!("cargo::rustc-env=CULVERT_PROFILE={}", profile.unwrap_or("unknown"));
}
