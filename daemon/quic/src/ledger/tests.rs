use s2n_quic::provider::event::events::Frame;
use s2n_quic_core::event::{IntoEvent as _, builder};

use super::{account::Account, *};

fn sent(id: u64, offset: u64, len: u16) -> Frame {
    builder::Frame::Stream { id, offset, len, is_fin: false }.into_event()
}

fn max_stream_data(id: u64, value: u64) -> Frame {
    builder::Frame::MaxStreamData { id, stream_type: builder::StreamType::Bidirectional, value }.into_event()
}

#[test]
fn bytes_count_once_however_often_they_are_sent() {
    let mut account = Account::new(true);
    let (ledger, _) = account.join();
    let stream = account.open(0, 7);
    ledger.hand_over(3_000);
    for (offset, len) in [(0, 1_000), (0, 1_000), (1_000, 500), (500, 500), (1_500, 1_500)] {
        account.on_frame_sent(&sent(0, offset, len));
    }
    assert_eq!((stream.sent_bytes(), ledger.unsent_bytes()), (3_000, 0));
    // Frames of streams that the driver does not have do not count.
    account.on_frame_sent(&sent(4, 0, 100));
    assert_eq!(ledger.gone_bytes(), 3_000);
}

#[test]
fn a_stream_is_finished_once_its_fin_has_been_sent() {
    let mut account = Account::new(true);
    let stream = account.open(0, 7);
    account.on_frame_sent(&sent(0, 0, 1_000));
    assert!(!stream.is_finished());
    account.on_frame_sent(&builder::Frame::Stream { id: 0, offset: 1_000, len: 0, is_fin: true }.into_event());
    // Lost bytes are sent again.
    account.on_frame_sent(&sent(0, 0, 1_000));
    assert!(stream.is_finished());
}

#[test]
fn a_limit_that_grew_before_its_stream_was_accepted_counts() {
    let mut account = Account::new(true);
    account.on_frame_received(&max_stream_data(8, 5_000));
    account.on_frame_received(&max_stream_data(8, 4_000));
    assert_eq!(account.open(8, 0).max_data(0), 5_000);
    // Streams that are gone, that are ours, or that only the peer sends on, leave nothing behind.
    account.close(8);
    for id in [8, 4, 1, 2] {
        account.on_frame_received(&max_stream_data(id, 9_000));
    }
    assert_eq!(account.open_streams(), 0);
}

#[test]
fn a_blocked_stream_is_notified_once_when_its_limit_grows() {
    let mut account = Account::new(true);
    let (_, told) = account.join();
    let told = told.unwrap();
    let stream = account.open(0, 7);
    account.on_frame_received(&max_stream_data(0, 1_000));
    assert!(told.try_recv().is_err(), "nobody asked");
    assert_eq!(stream.max_data(1_000), 1_000);
    account.on_frame_received(&max_stream_data(0, 2_000));
    account.on_frame_received(&max_stream_data(0, 3_000));
    assert_eq!((told.try_recv(), told.try_recv().is_err()), (Ok(7), true));
    for _ in 0..3 {
        account.on_frame_received(&builder::Frame::StopSending { id: 0, error_code: 0 }.into_event());
    }
    assert_eq!((told.try_recv(), told.try_recv().is_err()), (Ok(7), true));
}

#[test]
fn another_binding_counts_at_once_by_what_is_known_of_the_path() {
    let mut account = Account::new(false);
    let (ledger, _) = account.join();
    let rtt = Duration::from_millis(100);
    account.on_recovery_metrics(250_000, 0, rtt, rtt);
    let mark = || ledger.low_mark.load(Relaxed);
    assert_eq!(mark(), 12 * 1_200);
    let fixed = |packets| Binding::Late { floor_packets: Some(packets) };
    for (binding, expected) in
        [(fixed(2), 3_125), (fixed(40), 40 * 1_200), (Binding::Early, u64::MAX), (Binding::default(), 12 * 1_200)]
    {
        ledger.bind(binding);
        assert_eq!((mark(), ledger.binding()), (expected, binding));
        assert_eq!(ledger.binds_late(), binding != Binding::Early);
        account.on_recovery_metrics(250_000, 0, rtt, rtt);
        assert_eq!(mark(), expected, "{binding:?} stays");
    }
}

#[test]
fn larger_packets_count_at_once_and_carry_their_bytes_beside_long_ids_and_numbers() {
    let mut account = Account::new(false);
    let (ledger, _) = account.join();
    ledger.bind(Binding::Late { floor_packets: Some(40) });
    account.on_mtu(1_450);
    assert_eq!(ledger.low_mark.load(Relaxed), 40 * (1_450 - PACKET_OVERHEAD_BYTES));
    // A 1-RTT header with the longest ID and packet number (RFC 9000 §17.3.1), a STREAM frame with its length beyond 16 streams and 1 GiB
    // (§19.8), and the tag (RFC 9001 §5.3).
    let (header, frame, tag) = (1 + 20 + 4, 1 + 2 + 8 + 2, 16);
    assert!(ledger.packet_bytes() + header + frame + tag <= 1_450, "{} bytes", ledger.packet_bytes());
}

#[test]
fn there_is_room_until_the_low_mark_and_again_when_bytes_have_left_or_were_given_back() {
    let mut account = Account::new(false);
    let (ledger, _) = account.join();
    account.open(0, 0);
    let quantum = ledger.room().unwrap();
    assert!(quantum >= 1_200);
    ledger.hand_over(1 << 20);
    assert_eq!(ledger.room(), None);
    ledger.give_back(1 << 19);
    assert_eq!(ledger.room(), None);
    ledger.give_back(1 << 19);
    assert_eq!(ledger.room(), Some(quantum));
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicU32);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_driver_that_begins_to_wait_after_the_bytes_have_left_is_told_so_and_one_that_waits_before_is_woken() {
    for waits_first in [true, false] {
        let mut account = Account::new(true);
        let (ledger, _) = account.join();
        account.open(0, 0);
        let woken = Arc::<Woken>::default();
        ledger.driver().register(&woken.clone().into());
        ledger.hand_over(60_000);
        assert_eq!(ledger.room(), None);
        let mut waits = waits_first && ledger.wait_for_room();
        account.on_frame_sent(&sent(0, 0, 60_000));
        account.on_progress();
        if !waits_first {
            waits = ledger.wait_for_room();
        }
        assert_eq!((waits, woken.0.load(Relaxed)), (waits_first, u32::from(waits_first)));
    }
}

#[test]
fn a_window_opens_while_it_is_used_and_grows_as_in_slow_start() {
    let mut account = Account::new(false);
    let (ledger, _) = account.join();
    let rtt = Duration::from_millis(100);
    let mut opens = |window: u32, in_flight: u32, at_ms: u64| {
        account.on_recovery_metrics(window, in_flight, rtt, Duration::from_millis(at_ms));
        ledger.opens_window()
    };
    assert!(opens(15_000, 12_000, 1_000));
    assert_eq!([opens(20_000, 15_000, 1_050), opens(30_000, 25_000, 1_100)], [true; 2], "it doubles in a round trip");
    assert!(!opens(38_000, 12_000, 1_150), "it is not used");
    assert!(opens(38_000, 30_000, 1_200) && opens(39_500, 30_000, 1_250), "it has grown a moment ago");
    assert!(!opens(39_500, 30_000, 1_310), "a packet in a round trip is no slow start");
    assert!(!opens(18_000, 16_000, 1_400), "it shrinks");
    assert!(!opens(22_000, 16_000, 1_450) && opens(28_000, 16_000, 1_460));
}
