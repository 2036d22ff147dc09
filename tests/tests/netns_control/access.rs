//! What each caller may do, by user and group.

use std::{os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use lab::{
    process::{run, said, wait_for},
    site::{Family, SOON, Site, Terms},
};

use super::{VOICE, connect, in_force};

/// Runs `pacectl` as another user and group; returns its exit code and output.
pub(crate) fn pacectl_as(site: &Site, (uid, gid): (u32, u32), arguments: &[&str]) -> (Option<i32>, String) {
    // Other users may not enter the directory of the build's programs.
    let copy = site.path("pacectl");
    if !copy.exists() {
        // Another process must copy: a child that another test starts may briefly inherit a file that this process has open
        // for writing, and a file open for writing cannot be executed.
        let copied = Command::new("cp").arg(lab::program("pacectl").unwrap()).arg(&copy).status().unwrap();
        assert!(copied.success(), "{copied}");
    }
    let mut command = Command::new(&copy);
    command.arg("--socket").arg(site.path("control.sock")).args(arguments).uid(uid).gid(gid);
    said(run(command, "").unwrap()).unwrap()
}

pub(crate) const NOBODY: u32 = 65_534;

#[test]
fn a_user_who_may_connect_may_read_but_neither_write_nor_see_addresses() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let policy = site.write("policy.toml", "").unwrap().display().to_string();
    site.client(async || {
        let client = connect(&site).await;
        let _tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        // The socket belongs to root's group: the user nobody may connect as a member of that group.
        let reader = |arguments: &[&str]| pacectl_as(&site, (NOBODY, 0), arguments);
        for arguments in [&["policy", "get"][..], &["status"], &["policy", "list"]] {
            let (code, said) = reader(arguments);
            assert_eq!(code, Some(0), "{arguments:?}: {said}");
        }
        for list in ["tunnels", "connections"] {
            let (code, said) = reader(&[list]);
            assert!(code == Some(0) && !said.contains("10.0."), "{said}");
            assert!(site.json(&[list]).unwrap().to_string().contains("10.0."));
        }
        for arguments in [
            &["policy", "set", &policy][..],
            &["policy", "check", &policy],
            &["policy", "rollback"],
            &["policy", "confirm", "1"],
            &["policy", "forget"],
            &["reload"],
            &["close", "1"],
            &["class", "1", "default"],
            &["qlog", "1"],
            &["edge", "move", "--relay", "relay.example:443"],
            &["edge", "move", "--path", "dsl"],
        ] {
            let (code, said) = reader(arguments);
            assert!(
                code == Some(4) && said.contains("\"nobody\" may not change anything"),
                "{arguments:?}: {code:?} {said}"
            );
        }
        // Outside that group, the user nobody may not even connect.
        let (code, said) = pacectl_as(&site, (NOBODY, NOBODY), &["status"]);
        assert!(code == Some(5) && said.contains("this user may not connect"), "{code:?} {said}");
        assert_eq!((in_force(&site).1, site.json(&["tunnels"]).unwrap()[0]["class"].as_str()), (1, Some("voice")));
    })
    .unwrap();
}

#[test]
fn a_named_writer_may_write() {
    lab::ring!(Netns);
    let site = Site::new(Terms { control: "writers = [\"nobody\"]", ..Terms::default() }).unwrap();
    let policy = site.write("policy.toml", VOICE).unwrap().display().to_string();
    let (code, said) = pacectl_as(&site, (NOBODY, 0), &["policy", "set", &policy]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(site.json(&["policy", "list"]).unwrap()["revisions"][1]["author"], "nobody");
}

#[test]
fn a_socket_that_a_killed_daemon_left_is_taken_over_and_that_of_a_living_one_is_not() {
    lab::ring!(Netns);
    let mut site = Site::new(Terms::default()).unwrap();
    let second = |file: PathBuf| {
        let arguments = ["run".as_ref(), "--config".as_ref(), file.as_os_str()];
        site.chain.target.start(lab::program("paced").unwrap(), arguments).unwrap()
    };
    let mut other = second(site.path("paced.toml"));
    assert_eq!(other.wait(SOON).unwrap().code(), Some(1));
    assert!(other.output().contains("most likely another paced, uses the state folder"), "{}", other.output());
    let other = second(site.write_second().unwrap());
    other.wait_for_line("is served by another process; give each its own `socket`", SOON).unwrap();
    drop(other);
    assert_eq!(site.json(&["status"]).unwrap()["revision"], 1);
    site.relay.signal(libc::SIGKILL).unwrap();
    site.relay.wait(SOON).unwrap();
    assert_eq!(site.pacectl(&["status"], "").unwrap().0, Some(5));
    let (paced, file) = (lab::program("paced").unwrap(), site.path("paced.toml"));
    let _again = site.chain.relay.start(paced, ["run".as_ref(), "--config".as_ref(), file.as_os_str()]).unwrap();
    wait_for("the next daemon to answer", SOON, || (site.pacectl(&["status"], "").unwrap().0 == Some(0)).then_some(()))
        .unwrap();
}
