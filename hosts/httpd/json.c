/*
 * Reading the library's JSON: see json.h. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "json.h"

#include <string.h>

#define DEPTH 32

typedef struct walker
{
    const char *at;
    ath_json_fn fn;
    void *arg;
    char key[ATH_JSON_TEXT];
    char text[ATH_JSON_TEXT];
} walker;

static void skip_space(walker *w)
{
    w->at += strspn(w->at, " \t\r\n");
}

static int hex4(const char *s)
{
    int value = 0;

    for (int i = 0; i < 4; i++) {
        char c = s[i];

        if (c >= '0' && c <= '9')
            value = value << 4 | (c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            value = value << 4 | ((c | 32) - 'a' + 10);
        else
            return -1;
    }
    return value;
}

static size_t put_utf8(char *to, int c)
{
    if (c < 0x80) {
        to[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        to[0] = (char)(0xC0 | c >> 6);
        to[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    to[0] = (char)(0xE0 | c >> 12);
    to[1] = (char)(0x80 | (c >> 6 & 0x3F));
    to[2] = (char)(0x80 | (c & 0x3F));
    return 3;
}

/* At the opening quote. What does not fit is left out, and the string read to its end. */
static bool string(walker *w, char *to)
{
    size_t length = 0;

    for (w->at++; *w->at != '"'; w->at++) {
        int c = (unsigned char)*w->at;
        char utf8[4];
        size_t bytes = 1;

        if (c == '\0')
            return false;
        utf8[0] = (char)c;
        if (c == '\\') {
            static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
            const char *known;

            c = *++w->at;
            if (c == '\0')
                return false;
            if (c == 'u') {
                /* The library escapes control characters only, so a half of a surrogate pair is shown as it is. */
                int code = hex4(w->at + 1);

                if (code < 0)
                    return false;
                w->at += 4;
                bytes = put_utf8(utf8, code == 0 ? '?' : code);
            }
            else if ((known = strchr(names, c)) != NULL) {
                utf8[0] = meant[known - names];
            }
            else {
                return false;
            }
        }
        if (length + bytes < ATH_JSON_TEXT) {
            memcpy(to + length, utf8, bytes);
            length += bytes;
        }
    }
    w->at++;
    to[length] = '\0';
    return true;
}

static bool value(walker *w, bool member, int depth)
{
    const char *key = member ? w->key : NULL;

    skip_space(w);
    if (*w->at == '{' || *w->at == '[') {
        bool object = *w->at == '{';
        char close = object ? '}' : ']';

        if (depth == DEPTH)
            return false;
        w->fn(w->arg, object ? ATH_JSON_OBJECT : ATH_JSON_ARRAY, key, NULL);
        w->at++;
        skip_space(w);
        while (*w->at != close) {
            if (object) {
                if (*w->at != '"' || !string(w, w->key))
                    return false;
                skip_space(w);
                if (*w->at++ != ':')
                    return false;
            }
            if (!value(w, object, depth + 1))
                return false;
            skip_space(w);
            if (*w->at == ',') {
                w->at++;
                skip_space(w);
            }
            else if (*w->at != close) {
                return false;
            }
        }
        w->at++;
        w->fn(w->arg, ATH_JSON_END, NULL, NULL);
        return true;
    }
    if (*w->at == '"') {
        if (!string(w, w->text))
            return false;
        w->fn(w->arg, ATH_JSON_STRING, key, w->text);
        return true;
    }
    {
        size_t length = strcspn(w->at, ",}] \t\r\n");

        if (length == 0 || length >= ATH_JSON_TEXT)
            return false;
        memcpy(w->text, w->at, length);
        w->text[length] = '\0';
        w->at += length;
        w->fn(w->arg, ATH_JSON_OTHER, key, w->text);
        return true;
    }
}

bool ath_json_walk(const char *text, ath_json_fn fn, void *arg)
{
    walker w = {.at = text, .fn = fn, .arg = arg};

    return value(&w, false, 0);
}
