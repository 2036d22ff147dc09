//! Streams that cannot go on, because the peer does not read them or the transport takes no more of them.

use super::*;

#[test]
fn streams_that_the_peer_does_not_read_hold_up_no_others() {
    let scenario = |mut end: End| async move {
        // More than the peer's window of 1 MiB for each stream; beyond it, nothing can leave.
        let mut sends = Vec::new();
        for _ in 0..2 {
            let (recv, mut send) = open(&mut end, low()).await;
            send.push(zeros((1 << 20) + (1 << 19)));
            spawn(async move { _ = read(recv).await });
            sends.push(send);
        }
        time::delay(Duration::from_millis(60)).await;
        assert!(end.dispatcher.ledger().holds_back(), "the streams wait for turns");
        time::delay(Duration::from_millis(4_940)).await;
        assert_eq!(end.dispatcher.ledger().unsent_bytes(), 0, "bytes that cannot leave are not handed over");
        assert!(!end.dispatcher.ledger().holds_back(), "the peer holds them back, not their turns");
        assert!(sends.iter().all(|send| send.unsent_bytes() == 1 << 19), "what is beyond the window");
        let (recv, send) = open(&mut end, low()).await;
        send_all(send, 10_000);
        assert_eq!(answer(recv).await, Some(8));
    };
    simulate(&network(), SEED, late(Discipline::Fcfs), scenario, |end| never_read(end, 2)).unwrap();
}

#[test]
fn a_stream_goes_on_when_the_peer_reads_again() {
    let scenario = |mut end: End| async move {
        let (recv, send) = open(&mut end, low()).await;
        send_all(send, 2 << 20);
        assert_eq!(answer(recv).await, Some(8));
        assert_all_returned(&end.dispatcher).await;
    };
    let server = |mut end: End| async move {
        let (recv, send) = end.streams.accept_bidirectional_stream().await.unwrap().unwrap().split();
        time::delay(Duration::from_secs(5)).await;
        assert_eq!(read(recv).await, 2 << 20);
        send_all(end.dispatcher.attach(send, low()), 8);
        time::delay(Duration::from_secs(1)).await;
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, server).unwrap();
}

#[test]
fn a_stream_whose_buffer_in_the_transport_is_full_waits_aside() {
    let (schedule, transport) = late(Discipline::Fcfs);
    // Acknowledgements arrive after 20 ms; until then, the transport takes no more of a stream.
    let transport = Transport { stream_buffer_bytes: 4096, ..transport };
    let scenario = |mut end: End| async move {
        let (slow, send) = open(&mut end, low()).await;
        send_all(send, 500_000);
        let (quick, send) = open(&mut end, low()).await;
        send_all(send, 1_000);
        // At 4 KiB per round trip, the first stream takes 2.4 s.
        let answered = within(Duration::from_millis(200), read(quick)).await;
        assert_eq!(answered, Some(8), "the second stream did not wait for the first");
        assert_eq!(answer(slow).await, Some(8));
        assert_all_returned(&end.dispatcher).await;
    };
    simulate(&network(), SEED, (schedule, transport), scenario, serve).unwrap();
}
