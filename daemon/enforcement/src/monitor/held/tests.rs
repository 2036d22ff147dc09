//! What a monitor sets up, takes over and gives up.

use super::{super::message, *};

/// A device of this index is not there, so nothing is undone at the end.
const INDEX: u32 = 0x7fff_fff0;

/// The index of the loopback device in every network namespace (include/net/flow.h, `LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

fn plan() -> Plan {
    plan_of("eth0")
}

fn plan_of(device: &str) -> Plan {
    let text = format!("[kernel]\ndevices = [\"{device}\"]\negress = false\ningress = false\nmanage_qdisc = true");
    Plan::from(&config::Config::from_toml(&text).unwrap().kernel)
}

#[test]
fn an_fq_that_a_killed_paced_left_is_taken_over_and_one_of_others_is_not() {
    for (root, words, is_taken_over) in [
        (Root::of("fq", 0x70ac_0000), "set by paced before", true),
        (Root::of("fq", 0x8001_0000), "it was there", false),
        (Root::of("fq", 0), "it was there", false),
        (Root::of_queues("mq"), "below mq, it was there", false),
    ] {
        let (plan, ledger) = (plan(), Ledger::new().unwrap());
        let mut held = Held::inherit(&plan, &ledger);
        let how = held.set_fq("eth0", Some(INDEX), &BTreeMap::from([(INDEX, root.clone())])).unwrap();
        assert_eq!(how, How { words: words.to_owned(), outlives_the_monitor: true });
        assert_eq!(ledger.read().unwrap().fq.len(), usize::from(is_taken_over), "{root:?}");
        let again = held.set_fq("eth0", Some(INDEX), &BTreeMap::from([(INDEX, root)])).unwrap();
        assert_eq!(again.words, if is_taken_over { "set by paced" } else { words });
        assert_eq!(ledger.read().unwrap().fq.len(), usize::from(is_taken_over), "once");
    }
}

#[test]
fn an_fq_of_another_live_paced_is_not_taken_over() {
    let roots = BTreeMap::from([(INDEX - 1, Root::of("fq", 0x70ac_0000))]);
    let (plan, ledgers) = (plan(), [(); 2].map(|()| Ledger::new().unwrap()));
    let [mut first, mut second] = ledgers.each_ref().map(|ledger| Held::inherit(&plan, ledger));
    first.set_fq("eth0", Some(INDEX - 1), &roots).unwrap();
    let how = second.set_fq("eth0", Some(INDEX - 1), &roots).unwrap();
    assert_eq!((&*how.words, second.has_set_fq(INDEX - 1)), ("it was there, set by another paced", false));
    drop(first);
    second.set_fq("eth0", Some(INDEX - 1), &roots).unwrap();
    assert!(second.has_set_fq(INDEX - 1), "the first has ended");
}

#[test]
fn a_part_that_was_set_up_again_is_told_once() {
    let (near, far) = Socket::pair(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None).unwrap();
    let (plan, ledger) = (plan(), Ledger::new().unwrap());
    let mut held = Held::inherit(&plan, &ledger);
    held.restored.insert(("eth0".to_owned(), KernelPart::Fq));
    held.tell(&near).unwrap();
    held.tell(&near).unwrap();
    drop(near);
    let told = std::iter::from_fn(|| message::receive::<MonitorNotice>(&far).unwrap());
    let told: Vec<_> = told.map(|(notice, _)| format!("{notice:?}")).collect();
    assert_eq!(told, ["Restored { device: \"eth0\", part: Fq }", "Ready"]);
}

#[test]
fn the_claims_on_devices_that_are_gone_are_given_up() {
    let (plan, ledger) = (plan_of("paced-none"), Ledger::new().unwrap());
    let mut held = Held::inherit(&plan, &ledger);
    let claimed = [(Claimed::Fq, LOOPBACK), (Claimed::Fq, INDEX - 2), (Claimed::Clsact, INDEX - 2)];
    claimed.iter().for_each(|(what, index)| assert!(held.claims.claim(*what, *index)));
    held.look();
    assert_eq!(claimed.map(|(what, index)| held.claims.has(what, index)), [true, false, false]);
}

#[test]
fn a_clsact_that_a_killed_paced_left_is_taken_over_once_and_one_of_another_live_paced_is_not() {
    let (plan, ledgers) = (plan_of("lo"), [(); 3].map(|()| Ledger::new().unwrap()));
    let [mut none, mut first, mut second] = ledgers.each_ref().map(|ledger| Held::inherit(&plan, ledger));
    none.take_over_clsact(|_| Ok(false));
    first.take_over_clsact(|index| Ok(index == LOOPBACK));
    second.take_over_clsact(|index| Ok(index == LOOPBACK));
    // It is taken over already.
    first.take_over_clsact(|_| Ok(false));
    let is_claimed = [&none, &first, &second].map(|held| held.claims.has(Claimed::Clsact, LOOPBACK));
    // Otherwise, they would remove it from the host's device at the end.
    let entries = [&mut none, &mut first, &mut second].map(|held| std::mem::take(&mut held.entries.clsact));
    assert_eq!(is_claimed, [false, true, false]);
    let lo = Changed { device: "lo".to_owned(), index: LOOPBACK };
    assert_eq!(entries, [vec![], vec![lo.clone()], vec![]]);
    assert_eq!(ledgers[1].read().unwrap().clsact, [lo], "for a successor");
}
