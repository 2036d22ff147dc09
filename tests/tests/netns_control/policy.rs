//! Changes of the policy, and refused ones.

use std::{
    collections::BTreeSet,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use api::v1::GetPolicyRequest;
use lab::{
    process::{SetOnDrop, maps_of, run, wait_for},
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use serde_json::Value;

use super::{VOICE, connect, in_force, set};

#[test]
fn a_policy_that_is_set_moves_live_tunnels_and_going_back_moves_them_back() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let class = || site.json(&["tunnels"]).unwrap().as_array().unwrap().last().unwrap()["class"].clone();
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
fn a_refused_policy_file_changes_nothing_and_the_refusal_says_where_and_why() {
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
fn an_unconfirmed_trial_ends_by_itself() {
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
    let mut site = Site::new(Terms::default()).unwrap();
    site.configure(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    assert!(site.json(&["reload"]).unwrap()["revision"] == 2);
    assert!(in_force(&site).0.contains("[class.voice]"));
    site.configure(Terms { sections: "[class.voice]\nlevel = \"middle\"", ..Terms::default() }).unwrap();
    let (code, said) = site.pacectl(&["reload"], "").unwrap();
    assert!(code == Some(3) && said.contains("class.voice.level") && said.contains("\"low\""), "{code:?} {said}");
    assert_eq!(in_force(&site).1, 2, "nothing changes");

    let saved = "[class.saved]\n";
    set(&site, saved, &["--save"]);
    site.configure(Terms::default()).unwrap();
    site.json(&["reload"]).unwrap();
    assert_eq!(in_force(&site), (saved.into(), 3, "set".into()));
    assert_eq!(site.json(&["status"]).unwrap()["saved"], true);
    site.restart(Terms::default()).unwrap();
    site.json(&["reload"]).unwrap();
    site.relay.wait_for_line("configuration reloaded: no key has changed", SOON).unwrap();
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

/// The contents of maps, in one run of `bpftool`.
fn dump(maps: &[String; 2]) -> Vec<Value> {
    let lines: String = maps.iter().map(|id| format!("map dump id {id}\n")).collect();
    let mut bpftool = Command::new("bpftool");
    bpftool.args(["--json", "batch", "file", "-"]);
    let output = run(bpftool, &lines).unwrap();
    let said: Vec<Value> =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{lines}: {error}: {output:?}"));
    said.into_iter().map(|mut of| of["output"].take()).collect()
}

/// Asks for the revision in force over a lasting connection: a process for each question would take longer than a
/// revision is in force.
struct Revisions {
    runtime: tokio::runtime::Runtime,
    client: api::ControlClient,
}

impl Revisions {
    fn new(site: &Site) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(api::connect(&site.path("control.sock"))).unwrap();
        Self { runtime, client }
    }

    fn in_force(&mut self) -> u64 {
        let answer = self.runtime.block_on(self.client.get_policy(GetPolicyRequest::default())).unwrap();
        answer.into_inner().revision.unwrap().number
    }
}

/// The DSCPs that the kernel writes, of all classes; `None` if other terms took effect meanwhile.
fn dscps_in_kernel(revisions: &mut Revisions, half_and_terms: &[String; 2]) -> Option<BTreeSet<u64>> {
    let before = revisions.in_force();
    let dumped = dump(half_and_terms);
    let is_same = revisions.in_force() == before;
    let [half, terms] = &dumped[..] else { panic!("{dumped:?}") };
    let half = half[0]["formatted"]["value"].as_u64().unwrap() as usize;
    let terms = terms.as_array().unwrap();
    let terms = &terms[half * terms.len() / 2..(half + 1) * terms.len() / 2];
    // From 64 on, the packet keeps its own DSCP.
    let dscps =
        terms.iter().map(|entry| entry["formatted"]["value"]["dscp"].as_u64().unwrap()).filter(|dscp| *dscp < 64);
    is_same.then(|| dscps.collect())
}

#[test]
fn a_hundred_changes_under_load_cost_no_packet_and_are_never_seen_by_half() {
    lab::ring!(Netns);
    let kernel = "[kernel]\ndevices = [\"client\", \"target\"]";
    let site = Site::new(Terms { sections: kernel, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let maps = ["paced_half", "paced_terms"].map(|name| maps_of(site.relay.id(), name).unwrap().pop().unwrap());
    let (done, seen_in_kernel) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let _done = SetOnDrop(&done);
            for number in 0..100 {
                set(&site, &round(number), &[]);
                // On a busy machine, the reader of the kernel's tables gets no whole sample between two changes.
                if number % 5 == 4 {
                    let before = seen_in_kernel.load(Relaxed);
                    let is_seen = || (seen_in_kernel.load(Relaxed) > before).then_some(());
                    wait_for("a sample of the kernel's tables", SOON, is_seen).unwrap();
                }
            }
        });
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Relaxed) {
                let (text, number, _) = in_force(&site);
                // Revision 1 comes from the files; the first policy that is set is round 0.
                assert!(number == 1 || text == round(u32::try_from(number).unwrap() - 2), "{number}: {text}");
                let stats = site.json(&["classes"]).unwrap();
                let names: Vec<_> =
                    stats["classes"].as_array().unwrap().iter().map(|of| of["class"].as_str().unwrap()).collect();
                let whole = [&["default"][..], &["default", "even-a", "even-b"], &["default", "odd-a", "odd-b"]];
                assert!(whole.contains(&&names[..]), "{names:?}");
                seen += 1;
            }
            seen
        });
        let kernel_reader = scope.spawn(|| {
            let mut revisions = Revisions::new(&site);
            while !done.load(Relaxed) {
                if let Some(found) = dscps_in_kernel(&mut revisions, &maps) {
                    let whole = [BTreeSet::new(), DSCPS[0].into(), DSCPS[1].into()];
                    assert!(whole.contains(&found), "{found:?}");
                    seen_in_kernel.fetch_add(1, Relaxed);
                }
            }
        });
        site.client(async || {
            let client = connect(&site).await;
            let mut tunnels = Vec::new();
            for _ in 0..8 {
                tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
            }
            let mut number = 0_u32;
            while !done.load(Relaxed) {
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
    let seen = seen_in_kernel.load(Relaxed);
    assert!(seen >= 20, "{seen} samples of the kernel's tables");
    // After the changes, the DSCPs of the last round are in force.
    assert_eq!(dscps_in_kernel(&mut Revisions::new(&site), &maps), Some(DSCPS[1].into()));
    assert_eq!(in_force(&site).1, 101);
    assert_eq!(site.counts().unwrap().sum("dropped_packets_total"), 0);
}
