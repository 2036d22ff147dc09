//! The dispatcher over a simulated network: the order of streams, the budget, and failures.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

mod beside;
mod order;
mod unread;

use std::{
    future::poll_fn,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use config::policy::Policy;
use futures::future::join_all;
use lab::{
    simulation::{SEED, within},
    streams::{End, simulate},
};
use quic::{
    class::{ClassMetrics, PolicyRole, Terms},
    datagrams::{Schedule, Sender},
    dispatch::{Ahead, Binding, Dispatcher, ScheduledSendStream, StreamWriteError},
    endpoint::Transport,
};
use role::classes::Classes;
use s2n_quic::{
    provider::io::testing::{Model, spawn, time},
    stream::ReceiveStream,
};
use sched::stream::{Discipline, Expiry, Level, Low, Service};

/// Longer than any expected event takes.
const LONG: Duration = Duration::from_secs(30);

const ML: Discipline = Discipline::Ml { low: Low::Rr };

/// A path with a delay of 10 ms each way, limited only by the congestion window.
fn network() -> Model {
    let model = Model::default();
    model.set_delay(Duration::from_millis(10));
    model
}

fn late(discipline: Discipline) -> (Schedule, Transport) {
    (Schedule { discipline, ..Schedule::default() }, Transport::default())
}

fn low() -> Terms {
    Terms::default()
}

fn high() -> Terms {
    Terms::of(Service { level: Level::High, ..Service::default() }, Some(1_000_000_000))
}

async fn open(end: &mut End, terms: Terms) -> (ReceiveStream, ScheduledSendStream) {
    let (recv, send) = end.connection.open_bidirectional_stream().await.unwrap().split();
    (recv, end.dispatcher.attach(send, terms))
}

fn zeros(len: usize) -> Bytes {
    Bytes::from(vec![0; len])
}

/// Sends `len` bytes and finishes the stream.
fn send_all(mut send: ScheduledSendStream, len: usize) {
    send.push(zeros(len));
    send.finish();
}

/// Reads a stream to its end and returns its length in bytes.
async fn read(mut stream: ReceiveStream) -> usize {
    let mut bytes = 0;
    while let Ok(Some(chunk)) = stream.receive().await {
        bytes += chunk.len();
    }
    bytes
}

/// Reads all streams to their ends and answers each with its length.
async fn serve(mut end: End) {
    while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
        let dispatcher = end.dispatcher.clone();
        spawn(async move {
            let (recv, send) = stream.split();
            let mut send = dispatcher.attach(send, low());
            let bytes = read(recv).await;
            send.push(Bytes::copy_from_slice(&(bytes as u64).to_be_bytes()));
            send.finish();
        });
    }
}

async fn answer(recv: ReceiveStream) -> Option<usize> {
    within(LONG, read(recv)).await
}

/// Waits until the dispatcher holds no ended stream and no unsent byte.
async fn assert_all_returned(dispatcher: &Dispatcher) {
    let left = || (dispatcher.streams(), dispatcher.ledger().unsent_bytes());
    for _ in 0..1000 {
        if left() == (0, 0) {
            break;
        }
        time::delay(Duration::from_millis(10)).await;
    }
    assert_eq!(left(), (0, 0), "streams and unsent bytes remain");
}

#[test]
fn all_bytes_arrive_under_every_discipline() {
    let disciplines = [Discipline::Rr, Discipline::Fcfs, Discipline::Abs, ML, Discipline::Wfq, Discipline::Lottery];
    for discipline in disciplines {
        let network = network();
        network.set_drop_rate(0.02);
        let scenario = |mut end: End| async move {
            let mut streams = Vec::new();
            for len in [1, 1_000, 30_000, 200_000, 7] {
                let (recv, mut send) = open(&mut end, low()).await;
                streams.push(recv);
                spawn(async move {
                    for piece in vec![0; len].chunks(10_000) {
                        send.send(Bytes::copy_from_slice(piece)).await.unwrap();
                    }
                    send.finish();
                });
            }
            for recv in streams {
                assert_eq!(answer(recv).await, Some(8));
            }
            assert_all_returned(&end.dispatcher).await;
        };
        simulate(&network, SEED, late(discipline), scenario, serve).unwrap();
    }
}

#[test]
fn a_stream_says_each_time_when_all_of_it_was_acknowledged() {
    let scenario = |mut end: End| async move {
        let (recv, mut send) = open(&mut end, low()).await;
        for len in [10_000, 300_000] {
            send.push(zeros(len));
            assert!(poll_fn(|cx| send.poll_acknowledged(cx)).await.is_ok());
            assert_eq!(end.dispatcher.ledger().unsent_bytes(), 0);
        }
        send.finish();
        assert_eq!(answer(recv).await, Some(8));
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, serve).unwrap();
}

#[test]
fn a_stream_whose_end_was_acknowledged_makes_room_for_another() {
    const MOST: u64 = 8;
    let scenario = |mut end: End| async move {
        let mut answered = 0;
        for _ in 0..3 * MOST {
            let Some(opened) = within(LONG, end.connection.open_bidirectional_stream()).await else { break };
            let (recv, send) = opened.unwrap().split();
            send_all(end.dispatcher.attach(send, low()), 10);
            answered += u64::from(answer(recv).await == Some(8));
        }
        assert_eq!(answered, 3 * MOST);
    };
    let serve = |mut end: End| async move {
        while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
            let dispatcher = end.dispatcher.clone();
            spawn(async move {
                let (recv, send) = stream.split();
                let mut send = dispatcher.attach(send, low());
                let bytes = read(recv).await;
                send.push(Bytes::copy_from_slice(&(bytes as u64).to_be_bytes()));
                send.finish();
                _ = poll_fn(|cx| send.poll_acknowledged(cx)).await;
            });
        }
    };
    let transport = Transport { max_requests: MOST, ..Transport::default() };
    simulate(&network(), SEED, (Schedule::default(), transport), scenario, serve).unwrap();
}

#[test]
fn writers_get_an_error_when_the_driver_has_ended() {
    let scenario = |mut end: End| async move {
        let streams = [open(&mut end, low()).await, open(&mut end, low()).await];
        let waiting = streams.map(|(recv, mut send)| async move {
            send.push(zeros(1 << 20));
            let asked = poll_fn(|cx| send.poll_acknowledged(cx)).await;
            drop(recv);
            asked.is_err_and(|error| matches!(error, StreamWriteError::Cancelled))
        });
        let ends = async {
            time::delay(Duration::from_millis(50)).await;
            end.driver.abort();
        };
        let (told, ()) = within(LONG, futures::future::join(join_all(waiting), ends)).await.unwrap();
        assert_eq!(told, [true, true]);
        assert_eq!(end.dispatcher.streams(), 0);
        let (_recv, mut late) = open(&mut end, low()).await;
        assert!(late.send(zeros(1)).await.is_err_and(|error| matches!(error, StreamWriteError::Cancelled)));
        assert_eq!(end.dispatcher.streams(), 0);
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, serve).unwrap();
}

#[test]
fn a_peer_takes_no_part_of_a_stream_for_the_whole_when_the_driver_has_ended() {
    const WHOLE: usize = 10_000;
    let ends = Arc::new(Mutex::new(Vec::new()));
    let noted = ends.clone();
    let scenario = |mut end: End| async move {
        let mut streams = Vec::new();
        for (bytes, finishes) in [(WHOLE, true), (2 << 20, true), (WHOLE, false)] {
            let (recv, mut send) = open(&mut end, low()).await;
            send.push(zeros(bytes));
            if finishes {
                send.finish();
            }
            streams.push((recv, send));
        }
        time::delay(Duration::from_millis(300)).await;
        end.driver.abort();
        time::delay(Duration::from_secs(1)).await;
        drop(streams);
    };
    let server = |mut end: End| async move {
        while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
            let noted = noted.clone();
            spawn(async move {
                let (id, (mut recv, _send)) = (stream.id(), stream.split());
                // Until it reads, 1 MiB of the second stream arrives.
                time::delay(Duration::from_millis(500)).await;
                let ended_properly = loop {
                    match recv.receive().await {
                        Ok(Some(_)) => {}
                        Ok(None) => break true,
                        Err(_) => break false,
                    }
                };
                noted.lock().unwrap().push((id, ended_properly));
            });
        }
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, server).unwrap();
    let mut ends = ends.lock().unwrap().clone();
    ends.sort_unstable();
    assert_eq!(ends, [(0, true), (4, false), (8, false)]);
}

#[test]
fn a_stream_is_acknowledged_only_when_its_own_bytes_are_even_if_its_id_was_used_before() {
    let scenario = |mut end: End| async move {
        let (_recv, mut before) = open(&mut end, low()).await;
        before.push(zeros(1_000));
        before.finish();
        let moment = Duration::from_millis(2);
        assert!(within(moment, poll_fn(|cx| before.poll_acknowledged(cx))).await.is_none());
        drop(before);
        time::delay(moment).await;
        assert_eq!(end.dispatcher.streams(), 0, "all of it has left");
        let (_recv, mut stream) = open(&mut end, low()).await;
        let began = time::now();
        stream.push(zeros(1_000));
        assert!(poll_fn(|cx| stream.poll_acknowledged(cx)).await.is_ok());
        let took = time::now().saturating_duration_since(began);
        assert!(took >= Duration::from_millis(20), "acknowledged after {took:?}, before a round trip");
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, serve).unwrap();
}

/// A server that keeps the first `held` streams unread and serves the others.
async fn never_read(mut end: End, held: usize) {
    let mut kept = Vec::new();
    while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
        if kept.len() < held {
            kept.push(stream);
        } else {
            let dispatcher = end.dispatcher.clone();
            spawn(async move {
                let (recv, send) = stream.split();
                let send = dispatcher.attach(send, low());
                read(recv).await;
                send_all(send, 8);
            });
        }
    }
}

#[test]
fn credit_for_unsent_bytes_of_a_stream_is_given_back_when_either_side_ends_it() {
    let scenario = |mut end: End| async move {
        let mut streams = Vec::new();
        for _ in 0..20 {
            let (recv, mut send) = open(&mut end, low()).await;
            send.push(zeros(300_000));
            streams.push((recv, send));
        }
        time::delay(Duration::from_millis(30)).await;
        for (index, (recv, send)) in streams.into_iter().enumerate() {
            match index % 3 {
                0 => send.reset(7_u32.into()),
                // Dropped unfinished.
                1 => drop(send),
                _ => {
                    // The peer stops reading these after a while.
                    spawn(async move {
                        let mut send = send;
                        while send.send(zeros(10_000)).await.is_ok() {}
                        drop(recv);
                    });
                }
            }
        }
        assert_all_returned(&end.dispatcher).await;
        let (recv, send) = open(&mut end, low()).await;
        send_all(send, 1_000);
        assert_eq!(answer(recv).await, Some(8));
    };
    let server = |mut end: End| async move {
        let mut opened = 0;
        while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
            let (mut recv, send) = stream.split();
            let mut send = end.dispatcher.attach(send, low());
            opened += 1;
            let stops = opened <= 20;
            spawn(async move {
                if stops {
                    time::delay(Duration::from_millis(100)).await;
                    _ = recv.stop_sending(3_u32.into());
                    return;
                }
                read(recv).await;
                send.push(zeros(8));
                send.finish();
            });
        }
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, server).unwrap();
}

#[test]
fn writers_of_a_connection_that_ends_are_told() {
    let scenario = |mut end: End| async move {
        let mut writers = Vec::new();
        for _ in 0..3 {
            let (recv, mut send) = open(&mut end, low()).await;
            writers.push(async move {
                let kept = recv;
                let told = loop {
                    if let Err(error) = send.send(zeros(50_000)).await {
                        break error;
                    }
                };
                drop(kept);
                told
            });
        }
        let told = within(LONG, join_all(writers)).await.expect("every writer gets an error");
        assert!(told.iter().all(|error| matches!(error, StreamWriteError::Stream(_))), "{told:?}");
        assert_all_returned(&end.dispatcher).await;
    };
    let server = |end: End| async move {
        time::delay(Duration::from_millis(200)).await;
        end.connection.close(0_u32.into());
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, server).unwrap();
}

#[test]
fn a_writer_waits_while_its_queue_is_full() {
    let scenario = |mut end: End| async move {
        let (_recv, mut send) = open(&mut end, low()).await;
        // The peer's window is 1 MiB, and the queue exceeds its bound only a little.
        let mut written = 0;
        while within(Duration::from_secs(1), send.send(zeros(10_000))).await.is_some() {
            written += 10_000;
        }
        assert!((1 << 20..(1 << 20) + 64 * 1024).contains(&written), "{written} bytes were accepted");
    };
    simulate(&network(), SEED, late(Discipline::Rr), scenario, |end| never_read(end, 1)).unwrap();
}

#[test]
fn on_a_fast_path_the_queues_of_all_streams_together_have_room_for_a_turn() {
    let scenario = |mut end: End| async move {
        let (mut unread, mut others) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (recv, mut send) = open(&mut end, low()).await;
            send.push(zeros(1));
            unread.push(send);
            others.push(recv);
        }
        time::delay(Duration::from_millis(10)).await;
        let (recv, mut send) = open(&mut end, low()).await;
        for _ in 0..500 {
            send.send(zeros(64 * 1024)).await.unwrap();
        }
        send.finish();
        assert_eq!(answer(recv).await, Some(8));
        drop(send);
        let forgotten = async {
            while end.dispatcher.streams() > 2 {
                time::delay(Duration::from_millis(10)).await;
            }
        };
        within(LONG, forgotten).await.unwrap();
        let share = end.dispatcher.ledger().turn_bytes() as usize / 2;
        assert!(share > 125_000, "the path is fast: {share} bytes are half of a turn");
        for send in &mut unread {
            let mut written = 1;
            while within(Duration::from_secs(1), send.send(zeros(10_000))).await.is_some() {
                written += 10_000;
            }
            let queued = written - (1 << 20);
            assert!((share..share + 10_000).contains(&queued), "{queued} bytes wait beside the peer's window");
        }
    };
    let network = Model::default();
    network.set_delay(Duration::from_millis(1));
    simulate(&network, SEED, late(Discipline::Rr), scenario, |end| never_read(end, 2)).unwrap();
}

#[test]
fn streams_opened_and_reset_at_random_leave_nothing_behind() {
    let scenario = |mut end: End| async move {
        let mut random = 1_u64;
        for _ in 0..3_000 {
            // Knuth's MMIX generator.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = random >> 33;
            let (recv, mut send) = open(&mut end, if draw & 1 == 0 { low() } else { high() }).await;
            send.push(zeros((draw % 5_000) as usize));
            match draw / 8 % 4 {
                0 => send.reset(1_u32.into()),
                1 => drop(send),
                2 => {
                    send.finish();
                    drop(recv);
                }
                _ => {
                    send.finish();
                    spawn(async move { _ = read(recv).await });
                }
            }
            if draw.is_multiple_of(7) {
                time::delay(Duration::from_millis(draw % 20)).await;
            }
        }
        assert_all_returned(&end.dispatcher).await;
        let open_books =
            end.connection.query_event_context(|state: &quic::events::ConnectionState| state.account.open_streams());
        assert_eq!(open_books.unwrap(), 0);
    };
    simulate(&network(), SEED, late(ML), scenario, serve).unwrap();
}
