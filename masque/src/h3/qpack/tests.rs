use proptest::prelude::*;

use super::*;
use crate::varint;

const NO_LIMIT: u64 = varint::MAX;

fn fields(pairs: &[(&'static str, &'static str)]) -> Vec<Field> {
    pairs.iter().map(|(name, value)| Field::new(*name, *value)).collect()
}

fn failure(section: &[u8]) -> Code {
    match decode(section, NO_LIMIT) {
        Err(ProtocolError::Connection(code, _)) => code,
        other => panic!("{section:x?} gave {other:?}"),
    }
}

#[test]
fn the_literal_with_a_name_reference_of_rfc_9204_b_1_decodes() {
    let section = b"\x00\x00\x51\x0b/index.html";
    assert_eq!(decode(section, NO_LIMIT).unwrap(), fields(&[(":path", "/index.html")]));
}

#[test]
fn the_examples_of_rfc_9204_b_2_to_b_4_refer_to_the_dynamic_table_and_fail() {
    for section in [&[0x03, 0x81, 0x10, 0x11][..], &[0x05, 0x00, 0x80, 0xc1, 0x81], &[0x02, 0x00, 0x80]] {
        assert_eq!(failure(section), Code::QpackDecompressionFailed);
    }
}

#[test]
fn the_static_table_starts_at_0_and_ends_at_98() {
    // RFC 9204 §3.1 and Appendix A
    for (section, name, value) in [
        (&[0, 0, 0xc0][..], ":authority", ""),
        (&[0, 0, 0xcf], ":method", "CONNECT"),
        (&[0, 0, 0xd7], ":scheme", "https"),
        (&[0, 0, 0xd9], ":status", "200"),
        (&[0, 0, 0xff, 0x00], ":status", "100"),
        (&[0, 0, 0xff, 0x15], "authorization", ""),
        (&[0, 0, 0xff, 0x23], "x-frame-options", "sameorigin"),
    ] {
        assert_eq!(decode(section, NO_LIMIT).unwrap(), fields(&[(name, value)]));
    }
    for section in [&[0, 0, 0xff, 0x24][..], &[0, 0, 0x5f, 0x54, 0x00]] {
        assert_eq!(failure(section), Code::QpackDecompressionFailed);
    }
}

#[test]
fn every_reference_to_the_dynamic_table_fails() {
    // RFC 9204 §4.5.1 to §4.5.6 with a Maximum Table Capacity of 0
    for (section, what) in [
        (&[0x01, 0x00][..], "Required Insert Count 1"),
        (&[0x00, 0x80], "a negative Base"),
        (&[0x00, 0x85], "a more negative Base"),
        (&[0x00, 0x00, 0x80], "indexed"),
        (&[0x00, 0x00, 0x10], "indexed, post-base"),
        (&[0x00, 0x00, 0x40, 0x00], "literal with name reference"),
        (&[0x00, 0x00, 0x00, 0x00], "literal with post-base name reference"),
    ] {
        assert_eq!(failure(section), Code::QpackDecompressionFailed, "{what}");
    }
}

#[test]
fn any_base_that_is_not_negative_is_allowed_without_references() {
    // RFC 9204 §4.5.1.2
    assert_eq!(decode(&[0x00, 0x07, 0xd9], NO_LIMIT).unwrap(), fields(&[(":status", "200")]));
}

#[test]
fn an_integer_too_large_to_decode_fails_only_its_stream() {
    // RFC 9204 §7.4
    for beginning in [&[][..], &[0x00, 0x00, 0xff], &[0x00, 0x00, 0x5f], &[0x00, 0x00, 0x27], &[0x00, 0x00, 0x51, 0x7f]]
    {
        let section = [beginning, &[0xff; 20]].concat();
        let error = decode(&section, NO_LIMIT).unwrap_err();
        assert!(matches!(error, ProtocolError::Stream(Code::QpackDecompressionFailed, _)), "{beginning:x?}");
    }
}

#[test]
fn a_section_cut_short_fails() {
    let section = b"\x00\x00\xd9\x51\x0b/index.html\x22ab\x01c";
    assert_eq!(decode(section, NO_LIMIT).unwrap().len(), 3);
    for cut in [0, 1, 4, 5, 10, 15, 17, 18, 19, 20] {
        assert_eq!(failure(&section[..cut]), Code::QpackDecompressionFailed, "cut at {cut}");
    }
}

#[test]
fn the_limit_counts_names_values_and_32_for_each_field() {
    // RFC 9114 §4.2.2
    let section = encode(&fields(&[(":status", "200"), ("a", "bc")]));
    let size_bytes = 7 + 3 + 32 + 1 + 2 + 32;
    assert_eq!(decode(&section, size_bytes).unwrap().len(), 2);
    assert_eq!(decode(&section, size_bytes - 1), Err(SECTION_TOO_LARGE));
    assert_eq!(SECTION_TOO_LARGE.answer(), Some(431));
}

#[test]
fn fields_of_the_static_table_take_one_or_two_bytes() {
    assert_eq!(encode(&fields(&[(":method", "CONNECT"), (":status", "403")])), [0, 0, 0xcf, 0xff, 0x05]);
}

#[test]
fn secrets_are_never_indexed() {
    // RFC 9204 §7.1.3; the bit N is 0x10 without a name reference. The static table has `authorization` and `cookie`.
    for name in ["authorization", "proxy-authorization", "cookie"] {
        assert_eq!(encode(&fields(&[(name, "x")]))[2] & 0xf0, 0x30, "{name}");
    }
    let public = encode(&fields(&[("capsule-protocol", "?1")]));
    assert_eq!(public[2] & 0xf0, 0x20);
}

#[test]
fn the_encoder_stream_may_only_set_capacity_0() {
    // RFC 9204 §3.2.3 and §4.3
    assert_eq!(on_encoder_bytes(&[0x20, 0x20]), Ok(()));
    for (instruction, what) in [
        (&[0x21][..], "Set Dynamic Table Capacity 1"),
        (&[0x3f, 0xbd, 0x01], "Set Dynamic Table Capacity 220"),
        (&[0xc0, 0x01, b'a'], "Insert with Name Reference"),
        (&[0x41, b'a', 0x01, b'b'], "Insert with Literal Name"),
        (&[0x00], "Duplicate"),
    ] {
        let error = on_encoder_bytes(instruction).unwrap_err();
        assert!(matches!(error, ProtocolError::Connection(Code::QpackEncoderStreamError, _)), "{what}");
    }
}

#[test]
fn the_decoder_stream_may_only_cancel_streams() {
    // RFC 9204 §4.4
    let cancellations = [0x48, 0x7f, 0xff, 0x7f, 0x40];
    for cut in 0..cancellations.len() {
        let mut stream = DecoderStream::default();
        assert_eq!(stream.on_bytes(&cancellations[..cut]), Ok(()));
        assert_eq!(stream.on_bytes(&cancellations[cut..]), Ok(()));
        assert!(stream.0.is_none());
    }
    for (instruction, what) in [
        (&[0x84][..], "Section Acknowledgment"),
        (&[0x00], "Insert Count Increment 0"),
        (&[0x01], "Insert Count Increment 1"),
        (&[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00], "an endless stream ID"),
    ] {
        let error = DecoderStream::default().on_bytes(instruction).unwrap_err();
        assert!(matches!(error, ProtocolError::Connection(Code::QpackDecoderStreamError, _)), "{what}");
    }
}

proptest! {
    #[test]
    fn fields_encoded_decode_back(
        pairs in prop::collection::vec(
            (
                prop_oneof![
                    Just(&b"proxy-authorization"[..]).prop_map(<[u8]>::to_vec),
                    (0usize..99).prop_map(|index| STATIC_TABLE[index].0.as_bytes().to_vec()),
                    prop::collection::vec(any::<u8>(), 0..40),
                ],
                prop_oneof![
                    (0usize..99).prop_map(|index| STATIC_TABLE[index].1.as_bytes().to_vec()),
                    prop::collection::vec(any::<u8>(), 0..200),
                ],
            ),
            0..12,
        ),
    ) {
        let fields: Vec<Field> = pairs.into_iter().map(|(name, value)| Field::new(name, value)).collect();
        let size_bytes = fields.iter().map(Field::size_bytes).sum();
        prop_assert_eq!(decode(&encode(&fields), size_bytes), Ok(fields));
    }

    #[test]
    fn random_bytes_never_panic_and_stay_within_the_limit(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let section: Vec<u8> = [&[0, 0][..], &bytes].concat();
        for bytes in [&bytes, &section] {
            if let Ok(fields) = decode(bytes, 300) {
                prop_assert!(fields.iter().map(Field::size_bytes).sum::<u64>() <= 300);
            }
        }
        let _ = on_encoder_bytes(&bytes);
        let _ = DecoderStream::default().on_bytes(&bytes);
    }
}
