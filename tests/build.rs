//! Compiles for this machine what kernel programs and the product have in common, for a test that compares the two.

fn main() {
    println!("cargo::rerun-if-changed=../bpf/src");
    println!("cargo::rerun-if-changed=tests/pure/edt_pace.c");
    cc::Build::new().file("tests/pure/edt_pace.c").include("../bpf/src").warnings_into_errors(true).compile("edt");
}
