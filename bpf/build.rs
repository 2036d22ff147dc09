//! Compiles the kernel's programs with clang; the crate embeds the objects.

use std::{
    env,
    path::Path,
    process::{Command, ExitCode},
};

const PROGRAMS: [&str; 3] = ["egress", "ingress", "steer"];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-env-changed=CLANG");
    match PROGRAMS.iter().try_for_each(|program| compile(program)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={error}");
            ExitCode::FAILURE
        }
    }
}

fn compile(program: &str) -> Result<(), String> {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let variable = |name| env::var(name).map_err(|_| format!("{name} is not set: run this through cargo"));
    let object = Path::new(&variable("OUT_DIR")?).join(format!("{program}.bpf.o"));
    let mut command = Command::new(&clang);
    // Cargo runs this in the crate's folder: relative paths keep the build machine's paths out of the object.
    command.args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3"]);
    command.arg("-fdebug-compilation-dir=.").arg("-idirafter");
    // Debian's folder of <asm/types.h>, which clang looks for below the name of its target.
    command.arg(format!("/usr/include/{}-linux-gnu", variable("CARGO_CFG_TARGET_ARCH")?));
    command.args(["-c", &format!("src/{program}.bpf.c"), "-o"]).arg(object);
    let output = command.output().map_err(|error| {
        format!("{clang} cannot be run ({error}): install clang and libbpf-dev, or name another compiler in CLANG")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | ");
    Err(format!("{clang} could not compile src/{program}.bpf.c (are clang 14 and libbpf-dev installed?): {said}"))
}
