//! Languages by their English names, as `generation_config.json` of fine-tuned Whisper models has them.

/// English names with Whisper's codes.
#[rustfmt::skip]
const NAMES: [(&str, &str); 112] = [
    ("afrikaans", "af"), ("amharic", "am"), ("arabic", "ar"), ("assamese", "as"), ("azerbaijani", "az"),
    ("bashkir", "ba"), ("belarusian", "be"), ("bulgarian", "bg"), ("bengali", "bn"), ("tibetan", "bo"),
    ("breton", "br"), ("bosnian", "bs"), ("catalan", "ca"), ("valencian", "ca"), ("czech", "cs"),
    ("welsh", "cy"), ("danish", "da"), ("german", "de"), ("greek", "el"), ("english", "en"),
    ("castilian", "es"), ("spanish", "es"), ("estonian", "et"), ("basque", "eu"), ("persian", "fa"),
    ("finnish", "fi"), ("faroese", "fo"), ("french", "fr"), ("galician", "gl"), ("gujarati", "gu"),
    ("hausa", "ha"), ("hawaiian", "haw"), ("hebrew", "he"), ("hindi", "hi"), ("croatian", "hr"),
    ("haitian", "ht"), ("haitian creole", "ht"), ("hungarian", "hu"), ("armenian", "hy"),
    ("indonesian", "id"), ("icelandic", "is"), ("italian", "it"), ("japanese", "ja"), ("javanese", "jw"),
    ("georgian", "ka"), ("kazakh", "kk"), ("khmer", "km"), ("kannada", "kn"), ("korean", "ko"),
    ("latin", "la"), ("letzeburgesch", "lb"), ("luxembourgish", "lb"), ("lingala", "ln"), ("lao", "lo"),
    ("lithuanian", "lt"), ("latvian", "lv"), ("malagasy", "mg"), ("maori", "mi"), ("macedonian", "mk"),
    ("malayalam", "ml"), ("mongolian", "mn"), ("marathi", "mr"), ("malay", "ms"), ("maltese", "mt"),
    ("burmese", "my"), ("myanmar", "my"), ("nepali", "ne"), ("dutch", "nl"), ("flemish", "nl"),
    ("nynorsk", "nn"), ("norwegian", "no"), ("occitan", "oc"), ("panjabi", "pa"), ("punjabi", "pa"),
    ("polish", "pl"), ("pashto", "ps"), ("pushto", "ps"), ("portuguese", "pt"), ("moldavian", "ro"),
    ("moldovan", "ro"), ("romanian", "ro"), ("russian", "ru"), ("sanskrit", "sa"), ("sindhi", "sd"),
    ("sinhala", "si"), ("sinhalese", "si"), ("slovak", "sk"), ("slovenian", "sl"), ("shona", "sn"),
    ("somali", "so"), ("albanian", "sq"), ("serbian", "sr"), ("sundanese", "su"), ("swedish", "sv"),
    ("swahili", "sw"), ("tamil", "ta"), ("telugu", "te"), ("tajik", "tg"), ("thai", "th"),
    ("turkmen", "tk"), ("tagalog", "tl"), ("turkish", "tr"), ("tatar", "tt"), ("ukrainian", "uk"),
    ("urdu", "ur"), ("uzbek", "uz"), ("vietnamese", "vi"), ("yiddish", "yi"), ("yoruba", "yo"),
    ("cantonese", "yue"), ("chinese", "zh"), ("mandarin", "zh"),
];

/// The code of a language in English, in lower case.
pub(super) fn code(name: &str) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, code)| *code)
}
