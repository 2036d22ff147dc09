use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use config::Config;

use super::*;

const ONE: &str = "[class.one]\nweight = 1\n";
const TWO: &str = "[class.two]\nweight = 2\n";

/// Policies in their own folder, a log of those put in force, and a switch that makes enforcement fail.
struct Bench {
    policies: Arc<Policies>,
    enforced: Arc<Mutex<Vec<usize>>>,
    refuses: Arc<AtomicBool>,
    config: Config,
}

impl Bench {
    fn new(name: &str, text: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("paced-policy-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let config = Config::from_toml(&format!("state_dir = \"{}\"\n{text}", folder.display())).unwrap();
        let (enforced, refuses) = (Arc::<Mutex<Vec<usize>>>::default(), Arc::<AtomicBool>::default());
        let (noted, asked) = (enforced.clone(), refuses.clone());
        let enforce = Enforce {
            kernel: Box::new(move |_| if asked.load(Relaxed) { Err("the kernel is full".to_owned()) } else { Ok(()) }),
            roles: Box::new(move |policy| noted.lock().push(policy.classes.len())),
        };
        let policies = Policies::new(&config, StateFolder::unclaimed(&folder), None, enforce);
        assert_eq!(std::mem::take(&mut *enforced.lock()).len(), 1, "the first is put in force like any other");
        Self { policies, enforced, refuses, config }
    }

    fn set(&self, text: &str) -> Result<Submitted, PolicyRefusal> {
        self.submit(Submission { text: text.into(), ..Submission::default() })
    }

    fn submit(&self, submission: Submission) -> Result<Submitted, PolicyRefusal> {
        self.policies.submit(Submission { author: "alice".into(), ..submission })
    }

    fn saved(&self) -> Option<String> {
        read_saved(&self.config.state_dir).unwrap()
    }

    /// Number, text and origin of the revision in force.
    fn current(&self) -> (u64, String, Origin) {
        let current = self.policies.current();
        (current.number, current.text.clone(), current.origin)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.config.state_dir);
    }
}

#[test]
fn roles_are_given_the_policy_in_force_anew_without_a_new_revision() {
    let bench = Bench::new("renewed", ONE);
    bench.set(&format!("{ONE}{TWO}")).unwrap();
    let before = bench.current();
    assert_eq!(std::mem::take(&mut *bench.enforced.lock()), [3]);
    bench.policies.renew_roles();
    assert_eq!((&bench.enforced.lock()[..], bench.current()), (&[3][..], before));
}

#[test]
fn the_first_policy_is_that_of_the_roles_though_the_kernel_refuses_it() {
    let in_force = Arc::<Mutex<Vec<usize>>>::default();
    let noted = in_force.clone();
    let enforce = Enforce {
        kernel: Box::new(|_| Err("the kernel is full".to_owned())),
        roles: Box::new(move |policy| noted.lock().push(policy.classes.len())),
    };
    let policies =
        Policies::new(&Config::from_toml(ONE).unwrap(), StateFolder::unclaimed("/none".as_ref()), None, enforce);
    let outcome = policies.submit(Submission { text: TWO.into(), ..Submission::default() });
    assert_eq!(outcome.unwrap_err(), PolicyRefusal::Enforcement("the kernel is full".into()));
    assert_eq!((in_force.lock().clone(), policies.current().number), (vec![2], 1));
}

#[test]
fn a_policy_that_is_set_is_in_force_with_its_author_and_its_changes() {
    let bench = Bench::new("set", ONE);
    let told = bench.policies.watch();
    let accepted = bench.set(TWO).unwrap().revision;
    assert_eq!((accepted.number, &accepted.author[..], accepted.origin), (2, "alice", Origin::Set));
    assert!(accepted.diff.contains("-[class.one]") && accepted.diff.contains("+[class.two]"), "{}", accepted.diff);
    assert_eq!(bench.current(), (2, TWO.into(), Origin::Set));
    assert_eq!((told.borrow().revision.number, bench.enforced.lock().len()), (2, 1));
}

#[test]
fn a_refused_policy_changes_nothing_and_the_refusal_names_the_remedy() {
    let forward = "[[forward]]\nlisten = \"127.0.0.1:1\"\ntarget = \"a.example:2\"\nclass = \"one\"\n\
                   relay = \"https://relay.example/{target_host}/{target_port}/\"\n";
    let bench = Bench::new("refused", &format!("{forward}{ONE}"));
    let submission = |text: &str| Submission { text: text.into(), ..Submission::default() };
    let rows = [
        (submission("[class.one]\nwait = 1"), "line 2, column 1: class.one.wait: unknown key"),
        (submission(&" ".repeat(MAX_TEXT_BYTES + 1)), "write at most 1048576"),
        (submission(TWO), "forward on 127.0.0.1:1 uses; add [class.one]"),
        (submission("[relay]\nlisten = []"), "unknown key"),
        (Submission { expected: Some(7), ..submission(ONE) }, "made from revision 7, but revision 1 is in force"),
        (Submission { confirm_within: Some(Duration::from_secs(4000)), ..submission(ONE) }, "at most 3600"),
        (Submission { confirm_within: Some(Duration::ZERO), ..submission(ONE) }, "cannot wait 0 s"),
        (
            Submission { confirm_within: Some(Duration::from_secs(4)), save: true, ..submission(ONE) },
            "confirm it first",
        ),
    ];
    for (submission, why) in rows {
        let refusal = bench.submit(submission).unwrap_err().to_string();
        assert!(refusal.contains(why), "{refusal}\nlacks\n{why}");
    }
    bench.refuses.store(true, Relaxed);
    let refusal = bench.submit(Submission { save: true, ..submission(ONE) }).unwrap_err();
    assert_eq!(refusal, PolicyRefusal::Enforcement("the kernel is full".into()));
    assert_eq!((bench.current().0, bench.enforced.lock().len(), bench.saved()), (1, 0, None));
}

#[test]
fn a_class_that_a_listener_names_stays_in_the_policy() {
    let relay = "[relay]\nlisten = [\"127.0.0.1:1\"]\ncertificate = \"/c\"\nprivate_key = \"/k\"\nauth = \"none\"\n\
                 class = \"one\"\ntemplates = [\"https://relay.example/{target_host}/{target_port}/\"]\n";
    let bench = Bench::new("listener", &format!("{relay}{ONE}"));
    let refusal = bench.set(TWO).unwrap_err().to_string();
    assert!(refusal.contains("lacks the class \"one\", which the listener on 127.0.0.1:1 uses"), "{refusal}");
    bench.set(&format!("{ONE}{TWO}")).unwrap();
}

#[test]
fn a_schedule_that_a_listener_or_a_forward_names_stays_in_the_policy() {
    let relay = "[relay]\nlisten = [\"127.0.0.1:1\"]\ncertificate = \"/c\"\nprivate_key = \"/k\"\nauth = \"none\"\n\
                 schedule = \"one\"\ntemplates = [\"https://relay.example/{target_host}/{target_port}/\"]\n";
    let forward = "[[forward]]\nlisten = \"127.0.0.1:1\"\ntarget = \"a.example:2\"\nschedule = \"one\"\n\
                   relay = \"https://relay.example/{target_host}/{target_port}/\"\n";
    const ONE: &str = "[schedule.one]\ndiscipline = \"rr\"\n";
    for (name, namer, text) in [("by-listener", "listener", relay), ("by-forward", "forward", forward)] {
        let bench = Bench::new(name, &format!("{text}{ONE}"));
        let refusal = bench.set(TWO).unwrap_err().to_string();
        let expected = format!("lacks the schedule \"one\", which the {namer} on 127.0.0.1:1 uses; add [schedule.one]");
        assert!(refusal.contains(&expected), "{refusal}");
        bench.set(&ONE.replace("rr", "abs")).unwrap();
    }
}

#[test]
fn readers_of_revisions_do_not_wait_for_a_writer() {
    let bench = Bench::new("readers", ONE);
    bench.set(TWO).unwrap();
    let _writing = bench.policies.state();
    let numbers: Vec<_> = bench.policies.revisions().iter().map(|revision| revision.number).collect();
    assert_eq!((numbers, bench.policies.revision(1).unwrap().text.contains("one")), (vec![1, 2], true));
    assert_eq!(bench.policies.revision(9).unwrap_err(), PolicyRefusal::Unknown { number: 9, oldest: 1 });
}

#[test]
fn a_dry_run_says_what_would_be_and_does_not_do_it() {
    let bench = Bench::new("dry", ONE);
    let would = bench.submit(Submission { text: TWO.into(), dry_run: true, ..Submission::default() }).unwrap();
    assert_eq!((would.revision.number, bench.current().0), (2, 1));
    assert!(bench.enforced.lock().is_empty());
}

#[test]
fn going_back_makes_a_new_revision_of_an_old_text() {
    let bench = Bench::new("back", "");
    let first = bench.current().1;
    bench.set(ONE).unwrap();
    bench.set(TWO).unwrap();
    assert_eq!(bench.policies.roll_back(None, None, "bob", false).unwrap().revision.text, ONE);
    assert_eq!(bench.policies.roll_back(Some(1), None, "bob", false).unwrap().revision.number, 5);
    assert_eq!(bench.current(), (5, first, Origin::Rollback { to: 1 }));
    let refusal = bench.policies.roll_back(Some(9), None, "bob", false).unwrap_err();
    assert_eq!(refusal, PolicyRefusal::Unknown { number: 9, oldest: 1 });
    let refusal = bench.policies.roll_back(Some(1), Some(4), "bob", false).unwrap_err();
    assert_eq!(refusal, PolicyRefusal::Stale { expected: 4, current: 5 });
    assert_eq!(bench.policies.roll_back(Some(3), Some(5), "bob", false).unwrap().revision.text, TWO);
}

#[test]
fn nothing_is_before_the_first_revision() {
    let bench = Bench::new("first", ONE);
    assert_eq!(bench.policies.roll_back(None, None, "bob", false).unwrap_err(), PolicyRefusal::NothingBefore);
}

#[test]
fn a_rollback_just_after_a_trial_does_not_put_the_failed_policy_in_force() {
    let bench = Bench::new("late", ONE);
    bench
        .submit(Submission { text: TWO.into(), confirm_within: Some(Duration::from_nanos(1)), ..Submission::default() })
        .unwrap();
    assert_eq!(bench.policies.expire(2), Ok(true));
    let refusal = bench.policies.roll_back(None, None, "bob", false).unwrap_err();
    assert_eq!(refusal, PolicyRefusal::AlreadyBack { number: 2, current: 3 });
    assert_eq!(bench.policies.roll_back(Some(2), None, "bob", false).unwrap().revision.text, TWO, "by its number");
}

#[test]
fn an_unconfirmed_trial_restores_the_policy_before_it() {
    let bench = Bench::new("trial", ONE);
    let trial =
        |text: &str, time| Submission { text: text.into(), confirm_within: Some(time), ..Submission::default() };
    assert!(bench.submit(trial(TWO, MAX_CONFIRM)).unwrap().confirm_by.is_some());
    assert_eq!(bench.policies.expire(2), Ok(false), "its time is not over");
    assert!(matches!(bench.set(ONE), Err(PolicyRefusal::Unconfirmed { number: 2, .. })));
    assert!(matches!(bench.policies.reload(&bench.config, "root"), Err(PolicyRefusal::Unconfirmed { .. })));
    assert_eq!(bench.policies.confirm(1, false).unwrap_err(), PolicyRefusal::NothingToConfirm { number: 1 });
    bench.policies.confirm(2, false).unwrap();
    assert_eq!(bench.policies.in_force().trial, None);

    bench.submit(trial(ONE, Duration::from_nanos(1))).unwrap();
    bench.refuses.store(true, Relaxed);
    assert_eq!(bench.policies.expire(3), Err(PolicyRefusal::Enforcement("the kernel is full".into())));
    assert_eq!(bench.current(), (3, ONE.into(), Origin::Set), "it is tried again later");
    bench.refuses.store(false, Relaxed);
    assert_eq!(bench.policies.expire(3), Ok(true));
    assert_eq!(bench.current(), (4, TWO.into(), Origin::Unconfirmed { number: 3 }));
    assert_eq!((bench.policies.expire(3), bench.policies.expire(4)), (Ok(false), Ok(false)));
}

#[test]
fn a_saved_policy_takes_precedence_over_the_files_until_it_is_forgotten() {
    let bench = Bench::new("saved", ONE);
    bench.submit(Submission { text: TWO.into(), save: true, ..Submission::default() }).unwrap();
    assert_eq!((bench.saved().as_deref(), bench.policies.in_force().is_saved), (Some(TWO), true));
    bench.set("[class.three]\n").unwrap();
    let done = bench.policies.reload(&bench.config, "root").unwrap();
    assert_eq!(bench.current(), (4, TWO.into(), Origin::Saved), "what was only set is gone");
    let changed = vec!["class.three".to_owned(), "class.two".to_owned()];
    assert_eq!(done, PolicyReload { changed, replaced: Some((3, "alice".into())), is_saved: true });
    assert_eq!((bench.policies.forget_saved(), bench.policies.forget_saved()), (Ok(true), Ok(false)));
    let done = bench.policies.reload(&bench.config, "root").unwrap();
    assert_eq!((bench.current().2, bench.saved()), (Origin::Files, None));
    assert_eq!((done.changed.join(" "), done.replaced), ("class.one class.two".into(), None), "no caller had set it");
    assert_eq!(bench.policies.reload(&bench.config, "root").unwrap(), PolicyReload::default());
    assert_eq!(bench.current().0, 5, "nothing new");
}

#[test]
fn a_saved_policy_without_text_is_told_from_a_file_that_a_crash_has_emptied() {
    let bench = Bench::new("emptied", "");
    bench.submit(Submission { save: true, ..Submission::default() }).unwrap();
    assert_eq!(bench.saved().as_deref(), Some("\n"));
    fs::write(bench.config.state_dir.join(SAVED), "").unwrap();
    assert_eq!(read_saved(&bench.config.state_dir).unwrap_err().to_string(), "it is empty");
}

#[test]
fn a_reload_that_the_saved_policy_keeps_from_happening_says_so_and_how_to_end_that() {
    let bench = Bench::new("saved-unfit", ONE);
    bench.submit(Submission { text: TWO.into(), save: true, ..Submission::default() }).unwrap();
    let forward = "[[forward]]\nlisten = \"127.0.0.1:1\"\ntarget = \"a.example:2\"\nclass = \"one\"\n\
                   relay = \"https://relay.example/{target_host}/{target_port}/\"\n";
    let config = Config::from_toml(&format!("{forward}{ONE}")).unwrap();
    let refusal = bench.policies.reload(&config, "root").unwrap_err().to_string();
    for part in ["the saved policy does not fit these files", "lacks the class \"one\"", "`pacectl policy forget`"] {
        assert!(refusal.contains(part), "{refusal}");
    }
    assert_eq!(bench.current().1, TWO);
    bench.policies.forget_saved().unwrap();
    bench.policies.reload(&config, "root").unwrap();
    assert!(bench.current().1.contains("[class.one]"));
}

#[test]
fn a_policy_that_cannot_be_saved_is_not_put_in_force() {
    let bench = Bench::new("unsaved", ONE);
    // A folder in the file's place.
    fs::create_dir(bench.config.state_dir.join(SAVED)).unwrap();
    let save = Submission { text: TWO.into(), save: true, ..Submission::default() };
    assert!(matches!(bench.submit(save), Err(PolicyRefusal::NotSaved { .. })));
    assert_eq!(bench.current().0, 1);
    assert_eq!(*bench.enforced.lock(), [2, 2], "the previous policy is put back in force");
}

#[test]
fn a_policy_is_saved_although_the_state_folder_was_deleted() {
    let bench = Bench::new("deleted", ONE);
    fs::remove_dir_all(&bench.config.state_dir).unwrap();
    bench.submit(Submission { text: TWO.into(), save: true, ..Submission::default() }).unwrap();
    assert_eq!(bench.saved().as_deref(), Some(TWO));
    fs::remove_dir_all(&bench.config.state_dir).unwrap();
    let confirm_within = Some(Duration::from_secs(60));
    bench.submit(Submission { text: ONE.into(), confirm_within, ..Submission::default() }).unwrap();
    bench.policies.confirm(3, true).unwrap();
    assert_eq!(bench.saved().as_deref(), Some(ONE));
}

#[test]
fn a_hundred_writers_at_once_leave_one_history() {
    let bench = Bench::new("writers", ONE);
    std::thread::scope(|scope| {
        for writer in 0..100 {
            let bench = &bench;
            scope.spawn(move || {
                let text = format!("[class.w{writer}]\n");
                let expected = (writer % 2 == 0).then_some(1);
                let set = bench.submit(Submission { text, expected, ..Submission::default() });
                assert!(matches!(set, Ok(_) | Err(PolicyRefusal::Stale { expected: 1, .. })), "{set:?}");
            });
        }
    });
    let numbers: Vec<_> = bench.policies.revisions().iter().map(|revision| revision.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{numbers:?}");
    assert!(numbers.len() <= 64 && bench.current().0 >= 51);
    assert_eq!(bench.enforced.lock().len() as u64, bench.current().0 - 1);
}

#[test]
fn history_is_bounded_in_bytes_and_keeps_two() {
    let bench = Bench::new("bounded", "");
    for number in 0..20 {
        let comment = format!("# {number} {}\n", "x".repeat(MAX_TEXT_BYTES / 2));
        bench.set(&comment).unwrap();
    }
    let revisions = bench.policies.revisions();
    let bytes: usize = revisions.iter().map(|revision| revision.text.len() + revision.diff.len()).sum();
    assert!(revisions.len() >= 2 && bytes <= 8 << 20, "{} with {bytes}", revisions.len());
    assert!(matches!(
        bench.policies.roll_back(Some(1), None, "bob", false),
        Err(PolicyRefusal::Unknown { number: 1, .. })
    ));
}
