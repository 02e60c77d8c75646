//! Writing JSON: just enough for flat reports, so that the library needs no dependency for it.

use std::fmt::Write;

/// A JSON object or array under construction.
pub struct Json {
    text: String,
    close: char,
    first: bool,
}

impl Json {
    pub fn object() -> Json {
        Json { text: "{".into(), close: '}', first: true }
    }

    pub fn array() -> Json {
        Json { text: "[".into(), close: ']', first: true }
    }

    fn separate(&mut self) {
        if !std::mem::take(&mut self.first) {
            self.text.push(',');
        }
    }

    fn name(&mut self, name: &str) {
        self.separate();
        quote(&mut self.text, name);
        self.text.push(':');
    }

    /// A member whose value is JSON already.
    pub fn raw(mut self, name: &str, json: &str) -> Json {
        self.name(name);
        self.text.push_str(json);
        self
    }

    pub fn text(mut self, name: &str, value: &str) -> Json {
        self.name(name);
        quote(&mut self.text, value);
        self
    }

    pub fn int(self, name: &str, value: impl Into<i128>) -> Json {
        let value: i128 = value.into();
        self.raw(name, &value.to_string())
    }

    /// Numbers that JSON cannot say become null.
    pub fn float(self, name: &str, value: f64) -> Json {
        self.raw(name, &number(value))
    }

    /// As many digits as tell it from every other number, for what is read back.
    pub fn exact(self, name: &str, value: f64) -> Json {
        self.raw(name, &if value.is_finite() { format!("{value:?}") } else { "null".into() })
    }

    pub fn bool(self, name: &str, value: bool) -> Json {
        self.raw(name, if value { "true" } else { "false" })
    }

    pub fn optional_float(self, name: &str, value: Option<f64>) -> Json {
        self.float(name, value.unwrap_or(f64::NAN))
    }

    /// An element of an array.
    pub fn push(mut self, json: &str) -> Json {
        self.separate();
        self.text.push_str(json);
        self
    }

    pub fn end(mut self) -> String {
        self.text.push(self.close);
        self.text
    }
}

/// Up to six significant decimals after the point, no exponent.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "null".into();
    }
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn quote(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_what_a_parser_reads() {
        let inner = Json::array().push("1").push("null").end();
        let text = Json::object()
            .text("a", "say \"hi\"\\\n\u{1}ü")
            .int("b", -3)
            .float("c", 0.25)
            .float("d", f64::NAN)
            .exact("x", 0.1 + 0.2)
            .exact("y", 1e300)
            .bool("e", true)
            .raw("f", &inner)
            .end();
        assert_eq!(
            text,
            "{\"a\":\"say \\\"hi\\\"\\\\\\n\\u0001ü\",\"b\":-3,\"c\":0.25,\"d\":null,\"x\":0.30000000000000004,\"y\":1e300,\"e\":true,\"f\":[1,null]}"
        );
        assert_eq!(Json::object().end(), "{}");
        assert_eq!((number(3.0), number(0.0)), ("3".into(), "0".into()));
    }
}
