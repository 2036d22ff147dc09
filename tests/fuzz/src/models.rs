//! The requests of models' clients and the answers of engines.

use bytes::Bytes;
use engines::reported;
use openai::{Operation, RoutingFields, sse::EventStreamParser};
use serde_json::Value;

/// Bodies of requests: paced rewrites the model's name and may add the request for `usage`; the rest keeps its meaning.
pub fn model_request(input: &[u8]) {
    let name = "another \"model\"\n";
    // Parsing may fail, because a number may exceed the range of `Value`.
    let value = |body: &[u8]| serde_json::from_slice::<Value>(body);
    for operation in [Operation::Responses, Operation::ChatCompletions] {
        let Ok(ask) = RoutingFields::of(operation, input) else { continue };
        let rewritten = ask.for_engine(&Bytes::copy_from_slice(input), name, None).to_vec();
        let again = RoutingFields::of(operation, &rewritten).unwrap_or_else(|refusal| panic!("{refusal}"));
        assert_eq!(
            (&again.model[..], &again.service_tier, again.max_tokens),
            (name, &ask.service_tier, ask.max_tokens)
        );
        assert_eq!((again.prompt(&rewritten), again.fits(2)), (ask.prompt(input), ask.fits(2)));
        if let (Ok(mut before), Ok(after)) = (value(input), value(&rewritten)) {
            before["model"] = name.into();
            assert_eq!(before, after);
        }
    }
    let Ok(ask) = RoutingFields::read(input) else { return };
    let Some(added) = ask.usage_option(input) else { return };
    let asking = ask.for_engine(&Bytes::copy_from_slice(input), name, Some(&added)).to_vec();
    let again = RoutingFields::read(&asking).unwrap_or_else(|refusal| panic!("{refusal}"));
    assert_eq!((&again.model[..], again.usage_option(&asking)), (name, None), "it now decides itself");
    if let (Ok(mut before), Ok(after)) = (value(input), value(&asking)) {
        before["model"] = name.into();
        before["stream_options"]["include_usage"] = true.into();
        assert_eq!(before, after);
    }
}

/// Events of an engine: the forwarded bytes are a prefix of the received ones, in whole lines, wherever they are cut. A parser
/// that takes out events of `usage` reports the same counts.
pub fn model_events(input: &[u8]) {
    let Some((size, bytes)) = input.split_first() else { return };
    let pass = |size: usize, is_filtered: bool| {
        let mut events = if is_filtered { EventStreamParser::without_usage() } else { EventStreamParser::default() };
        let mut passed = Vec::new();
        let mut is_whole = true;
        for chunk in bytes.chunks(size.max(1)) {
            match events.push(Bytes::copy_from_slice(chunk)) {
                Ok(whole) => passed.extend_from_slice(&whole),
                Err(_) => {
                    is_whole = false;
                    break;
                }
            }
        }
        assert!(passed.last().is_none_or(|last| *last == b'\n'));
        assert!(is_filtered || bytes.starts_with(&passed));
        let counts = (events.report(), events.with_content(), events.is_done(), events.next_number());
        (is_whole.then_some(counts), is_whole.then_some(passed))
    };
    let [plain, cut] = [usize::MAX, usize::from(*size)].map(|size| pass(size, false));
    assert_eq!(plain, cut);
    let [without, cut] = [usize::MAX, usize::from(*size)].map(|size| pass(size, true));
    assert_eq!(without, cut);
    assert_eq!(without.0, plain.0);
}

/// The metrics of an engine: an additional line about another metric changes nothing, and the counts are bounded.
pub fn engine_metrics(input: &[u8]) {
    let read = reported::read(input);
    assert!(read.is_none_or(|of| of.running <= 1_000_000 && of.waiting <= 1_000_000), "{read:?}");
    assert_eq!(reported::read(&[input, b"\nprocess_open_fds 12\n"].concat()), read);
}
