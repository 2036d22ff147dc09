//! Runs the target that FUZZ_TARGET names under libFuzzer; `tests/fuzz/run` builds and starts it.

#![no_main]

use std::sync::LazyLock;

static READ: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let Some(target) = fuzz::TARGETS.iter().find(|target| target.name == name) else {
        let names: Vec<_> = fuzz::TARGETS.iter().map(|target| target.name).collect();
        eprintln!("FUZZ_TARGET is none of {}", names.join(" "));
        std::process::exit(2);
    };
    target.read
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| READ(input));
