//! The query string of a request: `find=a%20b&rows=25`.

/// The parameters of a request, decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query(Vec<(String, String)>);

/// Why a query string cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// The text is not `name=value` pairs in percent encoding of UTF-8, or too long.
    #[error("the query is not at most {MOST_BYTES} bytes of name=value pairs in percent-encoded UTF-8")]
    Malformed,
    /// The parameter is not one of this path.
    #[error("there is no parameter {0:?} here")]
    Unknown(String),
    /// The parameter cannot have this value.
    #[error("{name}={value:?}: write {expected}")]
    Value { name: &'static str, value: String, expected: String },
}

/// The longest query string. A name has at most 64 characters, a search in the page 100.
const MOST_BYTES: usize = 1_024;

impl Query {
    /// Reads what stands behind the question mark.
    ///
    /// # Errors
    /// [`QueryError::Malformed`]
    pub fn parse(text: &str) -> Result<Self, QueryError> {
        if text.len() > MOST_BYTES {
            return Err(QueryError::Malformed);
        }
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let decoded = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').ok_or(QueryError::Malformed)?;
            Ok((decode(name)?, decode(value)?))
        });
        decoded.collect::<Result<_, _>>().map(Self)
    }

    pub fn take(&mut self, name: &str) -> Option<String> {
        let place = self.0.iter().position(|(own, _)| own == name)?;
        Some(self.0.remove(place).1)
    }

    /// Takes the number `name`, which may be at most `most`.
    ///
    /// # Errors
    /// [`QueryError::Value`]
    pub fn number(&mut self, name: &'static str, most: u64) -> Result<Option<u64>, QueryError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.parse() {
            Ok(number) if number <= most => Ok(Some(number)),
            Ok(_) | Err(_) => {
                Err(QueryError::Value { name, value, expected: format!("a number from 0 to {most}") })
            }
        }
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// [`QueryError::Unknown`]
    pub fn end(self) -> Result<(), QueryError> {
        match self.0.into_iter().next() {
            Some((name, _)) => Err(QueryError::Unknown(name)),
            None => Ok(()),
        }
    }
}

fn decode(text: &str) -> Result<String, QueryError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
                let (high, low) = digit().zip(digit()).ok_or(QueryError::Malformed)?;
                (high << 4 | low) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| QueryError::Malformed)
}
