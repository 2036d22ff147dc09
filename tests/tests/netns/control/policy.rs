//! Changes of the policy, and refused ones.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use lab::process::wait_for;
use lab::site::{Family, SOON, Site, Terms};
use masque::tunnel::Form;
use serde_json::Value;

use super::{VOICE, connect, in_force, json, set};

#[test]
fn a_policy_that_is_set_moves_live_tunnels_and_going_back_moves_them_back() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let class = || json(&site, &["tunnels"]).as_array().unwrap().last().unwrap()["class"].clone();
    site.client(async || {
        let client = connect(&site).await;
        for form in [Form::Datagram, Form::Capsule] {
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            let sent = |class: &str| {
                site.counts().unwrap().of(&format!("class_payloads_total{{class=\"{class}\",role=\"relay\"}}"))
            };
            tunnel.send(form, b"before").await.unwrap();
            assert_eq!(tunnel.recv().await.unwrap().unwrap(), b"before");
            let sent_before = sent("voice");
            assert_eq!(class(), "default");

            let said = set(&site, VOICE, &[]);
            assert!(said.contains("+[class.voice]") && said.contains("is in force"), "{said}");
            assert_eq!(class(), "voice");
            tunnel.send(form, b"voice").await.unwrap();
            assert_eq!(tunnel.recv().await.unwrap().unwrap(), b"voice");
            assert_eq!(sent("voice"), sent_before + 1, "{form:?}");

            let (code, said) = site.pacectl(&["policy", "rollback"], "").unwrap();
            assert_eq!(code, Some(0), "{said}");
            assert_eq!(class(), "default");
            tunnel.send(form, b"after").await.unwrap();
            assert_eq!(tunnel.recv().await.unwrap().unwrap(), b"after");
            assert_eq!(sent("voice"), 0, "{form:?}: a class and its counters are removed together");
        }
    })
    .unwrap();
}

#[test]
fn what_is_refused_says_where_and_why_and_changes_nothing() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let before = in_force(&site);
    assert_eq!((before.1, &before.2[..]), (1, "files"));
    for (arguments, text, why) in [
        (
            &["set", "-"][..],
            "[class.voice]\nlevle = \"high\"\n",
            "line 2, column 1: class.voice.levle: unknown key; did you mean level?",
        ),
        (&["check", "-"], "[class.voice]\nlevel = 3\n", "line 2"),
        (&["diff", "-"], "[relay]\n", "unknown key"),
        (&["set", "-", "--expect", "7"], "", "made from revision 7, but revision 1 is in force"),
        (&["confirm"], "", "does not wait to be confirmed"),
        (&["rollback", "9"], "", "there is no revision 9"),
    ] {
        let (code, said) = site.pacectl(&[&["policy"], arguments].concat(), text).unwrap();
        assert!(code == Some(3) && said.contains(why), "{arguments:?}: {code:?}: {said}");
    }
    let (code, said) = site.pacectl(&["policy", "check", "-"], "").unwrap();
    assert!(code == Some(0) && said.contains("revision 2"), "{said}");
    assert_eq!(in_force(&site), before);
}

#[test]
fn a_trial_that_nobody_confirms_ends_by_itself() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let said = set(&site, VOICE, &["--confirm-within", "1"]);
    assert!(said.contains("unless it is confirmed"), "{said}");
    let gone = || Some(in_force(&site)).filter(|(_, number, _)| *number == 3);
    let (_, _, origin) = wait_for("the end of the trial", SOON, gone).unwrap();
    assert_eq!(origin, "2 was not confirmed");
    set(&site, VOICE, &["--confirm-within", "3600"]);
    let (code, said) = site.pacectl(&["policy", "set", "-"], "").unwrap();
    assert!(code == Some(3) && said.contains("revision 4 by") && said.contains("waits to be confirmed"), "{said}");
    assert_eq!(site.pacectl(&["policy", "confirm"], "").unwrap().0, Some(0));
    set(&site, "", &[]);
}

#[test]
fn a_reload_waits_for_the_outcome_and_what_is_saved_outlives_it() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.configure(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    assert!(json(&site, &["reload"])["revision"] == 2);
    assert!(in_force(&site).0.contains("[class.voice]"));
    site.configure(Terms { sections: "[class.voice]\nlevel = \"middle\"", ..Terms::default() }).unwrap();
    let (code, said) = site.pacectl(&["reload"], "").unwrap();
    assert!(code == Some(3) && said.contains("class.voice.level") && said.contains("\"low\""), "{code:?} {said}");
    assert_eq!(in_force(&site).1, 2, "nothing changes");

    let saved = "[class.saved]\n";
    set(&site, saved, &["--save"]);
    site.configure(Terms::default()).unwrap();
    json(&site, &["reload"]);
    assert_eq!(in_force(&site), (saved.into(), 3, "set".into()));
    assert_eq!(json(&site, &["status"])["saved"], true);
    let said = |arguments: &[&str]| site.pacectl(arguments, "").unwrap();
    let precedence = "the saved policy takes precedence";
    assert!(said(&["reload"]).1.contains(precedence), "{:?}", said(&["reload"]));
    let (code, forgotten) = said(&["policy", "forget"]);
    assert!(
        code == Some(0) && forgotten.contains("forgotten; the policy in force stays until the next reload"),
        "{forgotten}"
    );
    assert_eq!(in_force(&site).0, saved);
    let (code, reloaded) = said(&["reload"]);
    assert!(code == Some(0) && !reloaded.contains(precedence), "{reloaded}");
    assert_eq!(in_force(&site).2, "files");
}

/// The classes of a round, by its parity: a reader that sees one of a parity without the other, or finds other terms in
/// the kernel, has seen half a policy.
fn round(number: u32) -> String {
    let (even, rate, [a, b]) = if number.is_multiple_of(2) { ("even", 10, DSCPS[0]) } else { ("odd", 20, DSCPS[1]) };
    format!(
        "[class.{even}-a]\nrate_down = \"{rate} Mbit/s\"\ndscp = {a}\n[class.{even}-b]\ndscp = {b}\n\
         [[rule]]\nclass = \"{even}-a\"\nports = 7\n[[rule]]\nclass = \"{even}-b\"\n"
    )
}

/// The DSCPs of both classes, in even rounds and in odd ones.
const DSCPS: [[u64; 2]; 2] = [[10, 12], [18, 20]];

/// Runs `bpftool map` and parses its output.
fn bpftool(arguments: &[&str]) -> Value {
    let output = Command::new("bpftool").arg("--json").args(["map"]).args(arguments).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}"))
}

/// The ID of the map with this name that the relay holds.
fn map(site: &Site, name: &str) -> String {
    let folder = format!("/proc/{}/fdinfo", site.relay.id());
    let about =
        std::fs::read_dir(folder).unwrap().filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
    let ids: Vec<_> = about
        .filter_map(|about| Some(about.lines().find_map(|line| line.strip_prefix("map_id:"))?.trim().to_owned()))
        .collect();
    let named = |id: &&String| bpftool(&["show", "id", id])["name"] == name;
    ids.iter().find(named).unwrap_or_else(|| panic!("{name} among {ids:?}")).clone()
}

/// The DSCPs that the kernel writes, of all classes; `None` if other terms took effect meanwhile.
fn dscps_in_kernel(site: &Site, [terms, half]: &[String; 2]) -> Option<BTreeSet<u64>> {
    let entries = |id: &str| bpftool(&["dump", "id", id]).as_array().unwrap().clone();
    let revision = || in_force(site).1;
    let before = revision();
    let half = entries(half)[0]["formatted"]["value"].as_u64().unwrap() as usize;
    let terms = entries(terms);
    let terms = &terms[half * terms.len() / 2..(half + 1) * terms.len() / 2];
    // From 64 on, the packet keeps its own DSCP.
    let dscps =
        terms.iter().map(|entry| entry["formatted"]["value"]["dscp"].as_u64().unwrap()).filter(|dscp| *dscp < 64);
    let dscps = dscps.collect();
    (revision() == before).then_some(dscps)
}

#[test]
fn a_hundred_changes_under_load_cost_no_packet_and_are_never_seen_by_half() {
    lab::ring!(Netns);
    let kernel = "[kernel]\ndevices = [\"client\", \"target\"]";
    let site = Site::new(Terms { sections: kernel, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let maps = ["paced_terms", "paced_half"].map(|name| map(&site, name));
    let done = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for number in 0..100 {
                set(&site, &round(number), &[]);
            }
            done.store(true, relaxed);
        });
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(relaxed) {
                let (text, number, _) = in_force(&site);
                // Revision 1 comes from the files; the first policy that is set is round 0.
                assert!(number == 1 || text == round(u32::try_from(number).unwrap() - 2), "{number}: {text}");
                let stats = json(&site, &["classes"]);
                let names: Vec<_> =
                    stats["classes"].as_array().unwrap().iter().map(|of| of["class"].as_str().unwrap()).collect();
                let whole = [&["default"][..], &["default", "even-a", "even-b"], &["default", "odd-a", "odd-b"]];
                assert!(whole.contains(&&names[..]), "{names:?}");
                seen += 1;
            }
            seen
        });
        let kernel_reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(relaxed) {
                if let Some(found) = dscps_in_kernel(&site, &maps) {
                    let whole = [BTreeSet::new(), DSCPS[0].into(), DSCPS[1].into()];
                    assert!(whole.contains(&found), "{found:?}");
                    seen += 1;
                }
            }
            seen
        });
        site.client(async || {
            let client = connect(&site).await;
            let mut tunnels = Vec::new();
            for _ in 0..8 {
                tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
            }
            let mut number = 0_u32;
            while !done.load(relaxed) {
                for (tunnel, form) in tunnels.iter_mut().zip([Form::Datagram, Form::Capsule].into_iter().cycle()) {
                    tunnel.send(form, &number.to_be_bytes()).await.unwrap();
                }
                for tunnel in &mut tunnels {
                    let back = tokio::time::timeout(Duration::from_secs(20), tunnel.recv()).await;
                    assert_eq!(back.expect("nothing is lost").unwrap().unwrap(), number.to_be_bytes());
                }
                number += 1;
            }
            assert!(number > 0);
        })
        .unwrap();
        writer.join().unwrap();
        assert!(reader.join().unwrap() > 0);
        kernel_reader.join().unwrap();
    });
    // After the changes, the DSCPs of the last round are in force.
    assert_eq!(dscps_in_kernel(&site, &maps), Some(DSCPS[1].into()));
    assert_eq!(in_force(&site).1, 101);
    assert_eq!(site.counts().unwrap().sum("dropped_packets_total"), 0);
}
