//! `make install`: everything that it installs names the prefix, and lies where the system's programs look for it.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A folder to install to, with files in place of the programs and documents of a build. Removed on drop.
struct Build(PathBuf);

impl Build {
    fn new() -> Self {
        let build = Self(std::env::temp_dir().join(format!("paced-install-{}", std::process::id())));
        let programs = build.0.join("debug");
        ["share/man", "share/doc/docs"].iter().for_each(|folder| fs::create_dir_all(programs.join(folder)).unwrap());
        for name in [
            "paced",
            "pacectl",
            "share/man/a.1",
            "share/man/a.5",
            "share/man/a.8",
            "share/pacectl.bash",
            "share/_pacectl",
        ] {
            fs::write(programs.join(name), "").unwrap();
        }
        for name in ["share/pacectl.fish", "share/paced.schema.json"] {
            fs::write(programs.join(name), "").unwrap();
        }
        for page in ["share/doc/README.md", "share/doc/docs/page.md"] {
            fs::write(programs.join(page), "/usr/share/paced/grafana.json").unwrap();
        }
        build
    }

    fn install(&self, prefix: &str) -> (Output, PathBuf) {
        let root = self.0.join(prefix.trim_start_matches('/').replace('/', "-"));
        let mut make = Command::new("make");
        // The documents are as good as built.
        make.args(["-s", "-o", "documents", "install", "PROFILE=dev"]).arg(format!("PREFIX={prefix}"));
        make.arg(format!("DESTDIR={}", root.display())).env("CARGO_TARGET_DIR", &self.0);
        let project = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let output = make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").current_dir(project).output().unwrap();
        (output, root)
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn an_installation_names_its_prefix_alone_and_another_prefix_is_refused() {
    let build = Build::new();
    let (made, root) = build.install("/usr/local");
    assert!(made.status.success(), "{made:?}");
    let mut named = 0;
    for file in files(&root) {
        let bytes = fs::read(&file).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let paths: Vec<_> =
            ["/usr/bin/", "/usr/share/", "/usr/lib/"].iter().filter(|path| text.contains(*path)).collect();
        assert!(paths.is_empty(), "{} names {paths:?}", file.display());
        named += text.matches("/usr/local/").count();
    }
    assert!(named >= 3, "the service and its reload, and the schema of the configuration");
    let policy = "etc/dbus-1/system.d/org.paced.Paced1.conf";
    assert!(root.join(policy).is_file(), "dbus-daemon reads no policy below /usr/local");
    let (made, root) = build.install("/usr");
    assert!(
        made.status.success() && root.join("usr/share/dbus-1/system.d/org.paced.Paced1.conf").is_file(),
        "{made:?}"
    );
    assert!(!root.join(policy).exists());
    let (made, root) = build.install("/opt/paced");
    assert!(!made.status.success() && !root.exists(), "systemd would not find the units: {made:?}");
}
