//! Paths of requests: the operation that a path names, and the model if there is one.

use super::{error::OpenAiError, operation::Operation};

/// The operations that a path names completely.
const WHOLE: [Operation; 6] = [
    Operation::ChatCompletions,
    Operation::Completions,
    Operation::Responses,
    Operation::Embeddings,
    Operation::Models,
    Operation::Health,
];

/// The beginning of paths that name a response which an engine may have stored, or an operation on one.
const STORED: &[u8] = b"/v1/responses/";

impl Operation {
    /// Returns the operation that a request's method and path name; the query does not count.
    ///
    /// # Errors
    /// The path is unknown, or takes another method.
    pub fn of(method: &[u8], path: &[u8]) -> Result<Self, OpenAiError> {
        let operation = match model_in(path) {
            Some(_) => Self::Model,
            None => {
                let path = without_query(path);
                if path.starts_with(STORED) {
                    return Err(OpenAiError::StoredResponse);
                }
                let operation = WHOLE.into_iter().find(|operation| operation.path().as_bytes() == path);
                operation.ok_or(OpenAiError::NotFound)?
            }
        };
        let is_allowed = operation.methods().split(", ").any(|allowed| allowed.as_bytes() == method);
        if is_allowed { Ok(operation) } else { Err(OpenAiError::Method(operation)) }
    }
}

fn without_query(path: &[u8]) -> &[u8] {
    path.split(|byte| *byte == b'?').next().unwrap_or_default()
}

/// Returns the encoded name of the model in the path of [`Operation::Model`]. Names may contain slashes.
fn model_in(path: &[u8]) -> Option<&[u8]> {
    without_query(path).strip_prefix(b"/v1/models/").filter(|name| !name.is_empty())
}

/// Returns the name of the model in the path of [`Operation::Model`], percent-decoded (RFC 3986 §2.1).
///
/// # Errors
/// It is not UTF-8, or not encoded in this way.
pub fn model_name(path: &[u8]) -> Result<String, OpenAiError> {
    let mut encoded = model_in(path).unwrap_or_default().iter().copied();
    let mut name = Vec::new();
    while let Some(byte) = encoded.next() {
        let mut digit = || char::from(encoded.next()?).to_digit(16);
        name.push(match byte {
            b'%' => digit().zip(digit()).map(|(high, low)| (16 * high + low) as u8).ok_or(OpenAiError::NotFound)?,
            other => other,
        });
    }
    String::from_utf8(name).map_err(|_| OpenAiError::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_depends_on_method_and_path_and_not_on_the_query() {
        assert_eq!(Operation::of(b"POST", b"/v1/chat/completions?a=b"), Ok(Operation::ChatCompletions));
        assert_eq!(Operation::of(b"GET", b"/v1/models"), Ok(Operation::Models));
        assert_eq!(Operation::of(b"GET", b"/v1/completions"), Err(OpenAiError::Method(Operation::Completions)));
        assert_eq!(Operation::of(b"POST", b"/v1/completions/"), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"POST", b""), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"POST", b"/v1/responses?a=b"), Ok(Operation::Responses));
        assert_eq!(Operation::of(b"GET", b"/v1/responses"), Err(OpenAiError::Method(Operation::Responses)));
        assert_eq!(Operation::of(b"POST", b"/v1/responsesx"), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"GET", b"/v1/models/"), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"GET", b"/v1/models/a/b?c"), Ok(Operation::Model));
        assert_eq!(Operation::of(b"DELETE", b"/v1/models/a"), Err(OpenAiError::Method(Operation::Model)));
        assert_eq!(
            [&b"GET"[..], b"HEAD"].map(|method| Operation::of(method, b"/health")),
            [const { Ok(Operation::Health) }; 2]
        );
    }

    #[test]
    fn a_stored_response_is_not_found_whatever_is_asked_of_it() {
        for (method, path) in [
            ("GET", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1/input_items?limit=1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("POST", "/v1/responses/"),
        ] {
            let refusal = Operation::of(method.as_bytes(), path.as_bytes()).unwrap_err();
            assert_eq!((refusal.status(), refusal.code()), (404, "not_found"), "{method} {path}");
            assert!(refusal.to_string().contains("the engine that made them"), "{method} {path}: {refusal}");
        }
    }

    #[test]
    fn a_model_in_a_path_may_be_encoded_and_may_contain_slashes() {
        for path in ["/v1/models/meta/L%20%C3%A4?x=%", "/v1/models/meta%2fL%20ä"] {
            assert_eq!(model_name(path.as_bytes()), Ok("meta/L ä".to_owned()), "{path}");
        }
        for path in ["/v1/models/%", "/v1/models/%4", "/v1/models/%+4", "/v1/models/%ff", "/v1/models/%zz"] {
            assert_eq!(model_name(path.as_bytes()), Err(OpenAiError::NotFound), "{path}");
        }
    }
}
