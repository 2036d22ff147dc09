//! Compiles the arithmetic that kernel programs and the product share for this machine, so that a test can compare
//! both.

fn main() {
    println!("cargo::rerun-if-changed=../bpf/src");
    println!("cargo::rerun-if-changed=tests/pure/edt_pace.c");
    cc::Build::new().file("tests/pure/edt_pace.c").include("../bpf/src").warnings_into_errors(true).compile("edt");
}
