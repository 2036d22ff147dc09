use ratatui::{Terminal, backend::TestBackend};

use super::*;

/// Returns the lines that a screen of 80×24 shows.
fn lines(screen: &Screen) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| screen.draw(frame)).unwrap();
    let cells = terminal.backend().buffer().content();
    cells.chunks(80).map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()).collect()
}

fn class(name: &str, sent_bytes: u64, late_payloads: u64, dropped_full: u64) -> v1::ClassStats {
    v1::ClassStats {
        class: name.into(),
        role: "relay".into(),
        sent_bytes,
        sent_payloads: sent_bytes / 1_000,
        sojourn: Some(Duration::from_millis(sent_bytes / 500).try_into().unwrap()),
        late_payloads,
        late_packets: 10 * late_payloads,
        dropped_full,
        tunnels: 1,
        ..v1::ClassStats::default()
    }
}

fn stats(second: i64, classes: Vec<v1::ClassStats>) -> v1::WatchStatsResponse {
    let time = Some(prost_types::Timestamp { seconds: second, nanos: 0 });
    v1::WatchStatsResponse { time, revision: 3, connections: 1, tunnels: 2, classes, late_packets: 7 }
}

fn tunnel(id: u64, up_bytes: u64) -> v1::Tunnel {
    v1::Tunnel { id, class: "voice".into(), target: "192.0.2.1:443".into(), up_bytes, ..v1::Tunnel::default() }
}

fn key(letter: char) -> KeyEvent {
    KeyEvent::new(KeyCode::Char(letter), KeyModifiers::NONE)
}

fn screen() -> Screen {
    let mut screen = Screen::default();
    screen.update(
        stats(0, vec![class("default", 1_000, 0, 5), class("voice", 0, 0, 0)]),
        (vec![tunnel(1, 0), tunnel(2, 0)], false),
    );
    let classes = vec![class("default", 126_000, 0, 6), class("voice", 1_250_000, 3, 5)];
    screen.update(stats(1, classes), (vec![tunnel(1, 125_000), tunnel(2, 1_250_000)], false));
    screen
}

#[test]
fn rates_are_of_the_last_look_and_the_busiest_tunnel_is_first() {
    let shown = lines(&screen());
    assert_eq!(shown.len(), 24);
    assert!(shown[0].contains("revision 3") && shown[1].contains("7 late packets"), "{shown:#?}");
    let row =
        |part: &str| shown.iter().find(|line| line.starts_with(part)).unwrap_or_else(|| panic!("{part}: {shown:#?}"));
    let words = |part: &str| row(part).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    // 125 payloads waited 2 ms each, 250 ms in total, within a second.
    assert_eq!(words("default"), "default 1 1.0 Mbit/s 0.2 2.0 ms - - 1 -");
    assert_eq!(words("voice"), "voice 1 10.0 Mbit/s 2.5 2.0 ms 3 30 5 -");
    assert!(words("2 ").starts_with("2 - voice 192.0.2.1:443 10.0 Mbit/s"), "{shown:#?}");
    let place = |part: &str| shown.iter().position(|line| line.starts_with(part));
    assert!(place("2  ") < place("1  "), "{shown:#?}");
    assert!(shown[23].starts_with("q quit"));
}

#[test]
fn engines_and_requests_have_a_page_of_their_own() {
    let mut screen = screen();
    let before = lines(&screen);
    let engine = |state: &str, in_flight| v1::Engine {
        model: "large".into(),
        engine: "http://192.0.2.7:8000".into(),
        in_flight,
        max_in_flight: 4,
        state: state.into(),
        others_running: 2,
        others_waiting: 1,
        failed: 5,
        ..v1::Engine::default()
    };
    let request = v1::ModelRequest {
        id: 17,
        user: "ann".into(),
        class: "interactive".into(),
        model: "large".into(),
        stage: "at work".into(),
        tokens: 12,
        tokens_per_sec: 30.0,
        ..v1::ModelRequest::default()
    };
    screen.models =
        Models { engines: vec![engine("ready", 1), engine("down", 4), engine("ready", 4)], requests: vec![request] };
    assert!(!screen.on_key(key('m')));
    let shown = lines(&screen);
    let words = |line: &String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let engines: Vec<_> = shown.iter().filter(|line| line.starts_with("large")).map(words).collect();
    assert_eq!(engines.len(), 3, "{shown:#?}");
    assert!(engines[0].ends_with("ready 1/4 3 0 - 5") && engines[1].contains("down 4/4"), "{engines:#?}");
    assert!(engines[2].contains("full 4/4"), "{engines:#?}");
    let request = shown.iter().find(|line| line.starts_with("17")).map(words);
    assert_eq!(request.as_deref(), Some("17 ann interactive large at work - - 12 30.0"), "{shown:#?}");
    screen.on_key(key('m'));
    assert_eq!(lines(&screen), before);
}

#[test]
fn keys_sort_pause_and_quit() {
    let mut screen = screen();
    let first = |screen: &Screen| screen.changes().remove(0).of.class;
    assert_eq!(first(&screen), "default");
    for (letter, class) in
        [('b', "voice"), ('c', "default"), ('l', "voice"), ('c', "default"), ('p', "voice"), ('d', "voice")]
    {
        assert!(!screen.on_key(key(letter)));
        assert_eq!(first(&screen), class, "{letter}");
    }
    screen.on_key(key(' '));
    screen.update(stats(2, Vec::new()), (Vec::new(), false));
    assert!(screen.now.classes.len() == 2 && lines(&screen)[0].contains("PAUSED"));
    assert!(screen.on_key(key('q')));
}

#[test]
fn a_question_mark_explains_every_column_until_the_next_one() {
    let mut screen = screen();
    let before = lines(&screen);
    assert!(!screen.on_key(key('?')));
    let shown = lines(&screen);
    assert_eq!(shown.len(), 24);
    for line in help() {
        assert!(shown.contains(&line.to_string()), "{line}: {shown:#?}");
    }
    for (column, _) in &COLUMNS {
        let is_explained = |line: &String| line.starts_with(&format!("  {}  ", column.name));
        assert!(shown.iter().any(is_explained), "{}: {shown:#?}", column.name);
    }
    let heads: Vec<_> = COLUMNS.iter().flat_map(|(column, _)| column.name.split(' ')).collect();
    assert!(heads.iter().all(|word| shown.iter().any(|line| line.contains(word))), "{heads:?}: {shown:#?}");
    assert!(shown[22].contains("? again") && shown[23].starts_with("q quit"), "{shown:#?}");
    assert!(shown.iter().any(|line| line.starts_with("default")), "{shown:#?}");
    screen.on_key(key('?'));
    assert_eq!(lines(&screen), before);
}

#[test]
fn an_edge_is_told_by_its_classes_and_its_tunnels_by_their_senders() {
    let of_edge = |second, bytes| v1::WatchStatsResponse {
        classes: vec![v1::ClassStats { role: "edge".into(), ..class("default", bytes, 0, 0) }],
        ..stats(second, Vec::new())
    };
    let sent = |up_bytes| v1::Tunnel {
        role: "edge".into(),
        listen: "127.0.0.1:5001".into(),
        sender: "127.0.0.1:40000".into(),
        class: "default".into(),
        ..tunnel(3, up_bytes)
    };
    let mut screen = Screen::default();
    screen.update(of_edge(0, 0), (vec![sent(0)], false));
    screen.update(of_edge(1, 125_000), (vec![sent(125_000)], false));
    let shown = lines(&screen);
    let words = |part: &str| {
        let line = shown.iter().find(|line| line.starts_with(part)).unwrap_or_else(|| panic!("{part}: {shown:#?}"));
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(words("edge: default"), "edge: default 1 1.0 Mbit/s 0.2 2.0 ms - - - -");
    assert_eq!(words("3 "), "3 127.0.0.1:40000 default 192.0.2.1:443 1.0 Mbit/s 0 bit/s 122 KiB");
    assert!(words("tunnel ").starts_with("tunnel from class target"), "{shown:#?}");
}

#[test]
fn a_class_that_is_new_or_counts_anew_has_no_negative_rate() {
    let mut screen = screen();
    screen.update(stats(2, vec![class("default", 10, 0, 0), class("new", 500, 0, 0)]), (vec![tunnel(2, 5)], false));
    let changes = screen.changes();
    assert!(changes.iter().all(|change| change.bits_per_sec >= 0.0), "{changes:?}");
}

#[test]
fn a_rate_of_a_tunnel_is_per_second_and_unknown_while_it_cannot_be_told() {
    let since = |second: i64, tunnel: v1::Tunnel| {
        let since = Some(prost_types::Timestamp { seconds: second, nanos: 0 });
        v1::Tunnel { since, ..tunnel }
    };
    let mut screen = Screen::default();
    let rates = |screen: &Screen| screen.tunnels.iter().map(|of| (of.tunnel.id, of.rates)).collect::<Vec<_>>();
    screen.update(stats(100, Vec::new()), (vec![since(1, tunnel(1, 9_000_000))], false));
    assert_eq!(rates(&screen), [(1, None)], "its bytes since the start are no rate");
    let dashes = |line: &String| line.split_whitespace().filter(|word| *word == "-").count();
    assert!(lines(&screen).iter().any(|line| line.starts_with("1 ") && dashes(line) == 3), "sender, up and down");
    // Four seconds later; tunnel 2 was beyond the listed pages before, and tunnel 3 is new.
    let now = vec![since(1, tunnel(1, 9_002_000)), since(2, tunnel(2, 9_000_000)), since(102, tunnel(3, 4_000))];
    screen.update(stats(104, Vec::new()), (now, true));
    assert_eq!(rates(&screen), [(3, Some((8_000.0, 0.0))), (1, Some((4_000.0, 0.0))), (2, None)]);
    assert!(lines(&screen).iter().any(|line| line.contains("busiest of the oldest 3 tunnels")));
}

#[test]
fn ports_of_addresses_stay_on_a_screen_of_80_columns() {
    let of = |id, sender: &str, target: &str| v1::Tunnel {
        role: "edge".into(),
        sender: sender.into(),
        target: target.into(),
        class: "realtime-short".into(),
        ..tunnel(id, 1_000)
    };
    let shown = |tunnels: Vec<v1::Tunnel>| {
        let mut screen = Screen::default();
        screen.update(stats(0, Vec::new()), (tunnels, false));
        lines(&screen)
    };
    let four = shown(vec![of(1, "192.168.100.200:40000", "10.20.30.40:443")]);
    let row = |shown: &[String]| shown.iter().find(|line| line.starts_with("1  ")).cloned().unwrap_or_default();
    assert!(row(&four).contains("192.168.100.200:40000 realtime-sh 10.20.30.40:443"), "{four:#?}");
    let long = shown(vec![of(1, "[2001:db8:1:2:3:4:5:6]:40000", "a-long-name.of.a-target.example:8443")]);
    let words: Vec<_> = row(&long).split_whitespace().map(str::to_owned).collect();
    assert!(words[1].starts_with("[2001:") && words[1].ends_with("]:40000"), "{long:#?}");
    assert!(words[3].starts_with("a-long-") && words[3].ends_with(":8443"), "{long:#?}");
}

#[test]
fn widths_of_tunnels_never_exceed_the_screen() {
    for screen in 0..200 {
        for wanted in [[1, 1], [21, 21], [60, 1], [1, 60], [60, 60], [u16::MAX, u16::MAX]] {
            let widths = tunnel_widths(screen, [wanted[0], 14, wanted[1]]);
            let all = widths.iter().sum::<u16>() + widths.len() as u16 - 1;
            assert!(all <= screen.max(33), "{screen} {wanted:?}: {widths:?}");
            let from = widths[1];
            let address = "[2001:db8::1]:40000";
            assert!(shortened(address, from).chars().count() <= usize::from(from).max(1), "{screen} {wanted:?}");
        }
    }
}
