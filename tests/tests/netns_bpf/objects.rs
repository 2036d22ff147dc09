//! The compiled objects of the kernel programs.

use std::{fs, process::Command};

const OBJECTS: [(&str, &[u8]); 3] = [
    (bpf::egress::PROGRAM, bpf::egress::OBJECT),
    (bpf::ingress::PROGRAM, bpf::ingress::OBJECT),
    (bpf::steer::PROGRAM, bpf::steer::OBJECT),
];

/// Loads an object with bpftool, which uses libbpf, into a file system that only the shell's mount namespace contains.
const LOAD: &str = r#"
    set -e
    mount -t bpf bpf "$FOLDER"
    bpftool --debug prog loadall "$OBJECT" "$FOLDER/programs"
    ls "$FOLDER/programs"
"#;

/// The most instructions that a verifier may process for a program. It gives up after a million, and a starting relay waits
/// for it.
const MOST_INSTRUCTIONS: u32 = 20_000;

#[test]
fn libbpf_loads_every_object_too_and_verifiers_have_little_to_do() {
    lab::ring!(Netns);
    let folder = std::env::temp_dir().join(format!("paced-bpftool-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for (program, object) in OBJECTS {
        let file = folder.with_extension("o");
        fs::write(&file, object).unwrap();
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "sh", "-c", LOAD]).env("FOLDER", &folder).env("OBJECT", &file);
        let loaded = shell.output().unwrap();
        let said = String::from_utf8_lossy(&loaded.stderr);
        assert!(loaded.status.success(), "{program}: {said}");
        assert_eq!(String::from_utf8_lossy(&loaded.stdout).trim(), program);
        let verified = said.split_once("\nprocessed ").and_then(|(_, rest)| rest.split_once(" insns")).unwrap().0;
        assert!(verified.parse::<u32>().unwrap() <= MOST_INSTRUCTIONS, "{program}: {verified} instructions");
        fs::remove_file(file).unwrap();
    }
    fs::remove_dir(folder).unwrap();
}

#[test]
fn objects_name_no_folder_of_the_machine_that_built_them() {
    lab::ring!(Netns);
    let home = env!("CARGO_MANIFEST_DIR").trim_end_matches("/tests").as_bytes();
    for (program, object) in OBJECTS {
        assert!(!object.windows(home.len()).any(|bytes| bytes == home), "{program}");
    }
}
