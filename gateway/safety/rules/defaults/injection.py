"""Signs of prompt injection and jailbreaks in English, German, French and Spanish.

Each form has a weight: 1 a hint that ordinary texts show as well, 2 unusual, 3 hardly ever meant otherwise. What the
weights of neighbours add up to decides the severity (`gateway.safety.rules.scoring`).
"""

from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.rules.spec import Form, RuleSpec

_GAP: Final = r"[^.!?\n]{0,40}"
_SHORT: Final = r"[^.!?\n]{0,20}"
_MAX_LENGTH: Final = 240


def _scored(name: str, *forms: tuple[int, str] | tuple[int, str, str]) -> RuleSpec:
    """``forms``: weight, pattern and, where the pattern is dear for the pass over all, a hint."""
    return RuleSpec(
        f"injection.{name}",
        tuple(Form(rf"(?i){pattern}", False, weight, *hint) for weight, pattern, *hint in forms),
        Severity.MEDIUM,
        _MAX_LENGTH,
    )


_IGNORE = r"\b(?:ignore|disregard|forget|override|overrule|discard|neglect|do not follow|don't follow|stop following)\b"
_EARLIER = r"(?:previous|prior|preceding|above|earlier|former|existing|original|initial)"
_ORDERS = r"(?:instructions?|prompts?|directives?|guidelines|commands?|rules|orders|programming|training|constraints)\b"

_OVERRIDE = _scored(
    "override",
    (
        3,
        rf"{_IGNORE}\s{{1,3}}(?:all|any|every|each and every)\b(?: of)?{_SHORT}\b{_EARLIER}\b{_SHORT}\b{_ORDERS}",
    ),
    (3, rf"{_IGNORE}\s{{1,3}}(?:all )?(?:of )?(?:your|these|those)\b{_SHORT}\b{_ORDERS}"),
    (3, rf"{_IGNORE}\s{{1,3}}{_EARLIER}\b{_SHORT}\b{_ORDERS}"),
    (3, rf"{_IGNORE}\s{{1,3}}(?:all )?(?:the )?system (?:prompt|message|instructions)\b"),
    (2, rf"{_IGNORE}\s{{1,3}}the {_EARLIER}\b{_SHORT}\b{_ORDERS}"),
    (1, rf"{_IGNORE}\s{{1,3}}my {_EARLIER}\b{_SHORT}\b{_ORDERS}"),
    (
        3,
        rf"{_IGNORE}\s{{1,3}}(?:everything|anything|all) (?:that )?(?:you (?:were|have been|know|learned)|above this|written above)\b",
    ),
    (2, rf"{_IGNORE}\s{{1,3}}(?:everything|anything|all) (?:above|before|prior)\b"),
    (1, r"\b(?:new|updated|real|actual) (?:system )?(?:instructions|directives?|orders)\s{0,2}:"),
    (
        2,
        r"\byour (?:new|real|actual|true) (?:instructions|task|goal|objective|purpose|role) (?:is|are)\b",
    ),
    (
        3,
        rf"\b(?:bypass|disable|turn off|switch off|override|remove|drop|deactivate)\b{_SHORT}\byour (?:[a-z]{{1,12}} )?(?:safety|content|ethical|moral|filters?|guardrails?|restrictions?|guidelines|alignment)\b",
    ),
    (2, r"\byou (?:are|'re) no longer (?:bound|restricted|limited|required|obligated)\b"),
    (2, r"\bdo not (?:mention|reveal|tell|inform)\b[^.!?\n]{0,30}\b(?:the user|anyone)\b"),
    (
        3,
        rf"\b(?:ignorier(?:e|en|t)?|vergiss|vergessen sie|missachte|verwirf)\b{_SHORT}\b(?:alle|deine|ihre|jegliche|sämtliche)\b{_GAP}\b(?:anweisung(?:en)?|instruktionen|regeln|vorgaben|befehle|richtlinien)\b",
    ),
    (
        2,
        rf"\b(?:ignorier(?:e|en|t)?|vergiss|missachte)\b{_SHORT}\b(?:vorherige[nr]?|bisherige[nr]?|obige[nr]?|frühere[nr]?)\b{_GAP}\b(?:anweisung(?:en)?|instruktionen|regeln|vorgaben|befehle)\b",
    ),
    (
        3,
        rf"\b(?:ignore[zr]?|oublie[zr]?|néglige[zr]?|ne tiens? pas compte)\b{_SHORT}\b(?:toutes?|tes|vos|tous)\b{_GAP}\b(?:instructions|consignes|règles|directives|ordres)\b",
    ),
    (
        2,
        rf"\b(?:ignore[zr]?|oublie[zr]?)\b{_SHORT}\b(?:instructions|consignes|règles|directives)\b{_SHORT}\b(?:précédentes|antérieures|ci-dessus)",
    ),
    (
        3,
        rf"\b(?:ignora|ignore|olvida|olvide|omite|descarta)\b{_SHORT}\b(?:todas|todos|tus|sus)\b{_GAP}\b(?:instrucciones|reglas|órdenes|directrices|indicaciones)\b",
    ),
    (
        2,
        rf"\b(?:ignora|ignore|olvida|olvide)\b{_SHORT}\b(?:instrucciones|reglas|órdenes)\b{_SHORT}\b(?:anteriores|previas)\b",
    ),
)

_FREE = r"(?:unrestricted|unfiltered|uncensored|unlimited|jailbroken|amoral|unethical|evil|rogue)"
_ROLE_PLAY = _scored(
    "role_play",
    (
        3,
        r"\b(?:you are|you're|act as|become|pretend to be|play|called|named|as) (?:now )?(?:DAN|STAN|DUDE|AIM|AntiGPT|DevGPT)\b",
    ),
    (3, r"\bdo anything now\b"),
    (
        3,
        rf"\b(?:you are|you're|act as|pretend to be|behave as|respond as|simulate)\b{_SHORT}\b{_FREE} (?:ai|assistant|model|chatbot|bot|llm|language model|version)\b",
    ),
    (
        3,
        r"\b(?:pretend|act|imagine|assume|behave|respond)\b[^.!?\n]{0,30}\b(?:you (?:have|had) no|there are no|without any)\b[^.!?\n]{0,20}\b(?:restrictions|limitations|limits|rules|filters|guidelines|ethics|morals)\b",
    ),
    (
        2,
        r"\b(?:developer|debug|god|admin|dan|jailbreak|sudo|unrestricted) mode (?:is )?(?:now )?(?:enabled|activated|engaged|unlocked|on)\b",
    ),
    (
        2,
        r"\b(?:enter|enable|activate|switch (?:in)?to) (?:developer|god|dan|jailbreak|unrestricted) mode\b",
    ),
    (
        2,
        rf"\b(?:answer|respond|reply|write|speak)\b{_GAP}\bwithout (?:any )?(?:censorship|ethical|moral|safety|content)\b",
    ),
    (1, r"\bfrom now on,? (?:you (?:are|will|must|shall)|your|act|respond|answer)\b"),
    (1, r"\byou (?:can|will|must|should) (?:never|not) (?:refuse|decline|say no|apologi[sz]e)\b"),
    (1, r"\bstay in character\b"),
    (
        1,
        r"\bno (?:ethical|moral|content|safety) (?:restrictions|guidelines|constraints|filters|limits)\b",
    ),
    (
        3,
        rf"\b(?:du bist|sie sind|spiele?|verhalte dich)\b{_GAP}\b(?:uneingeschränkte?|unzensierte?|ungefilterte?)[rsn]? (?:ki|assistent|modell|chatbot)\b",
    ),
    (
        3,
        rf"\b(?:tue? so|verhalte dich|stell dir vor|antworte)\b{_GAP}\b(?:ohne (?:jegliche )?|keine(?:rlei)? )(?:einschränkungen|regeln|filter|beschränkungen|zensur)\b",
    ),
    (1, r"\bab (?:jetzt|sofort) (?:bist du|wirst du|antwortest du)\b"),
    (
        3,
        rf"\b(?:tu es|vous êtes|fais comme si|faites comme si|agis comme|imagine)\b{_GAP}\bsans (?:aucune? )?(?:restrictions?|limites?|filtres?|règles?|censure)\b",
    ),
    (1, r"\bà partir de maintenant,? (?:tu|vous)\b"),
    (
        3,
        rf"\b(?:eres|actúa como|finge|haz como si|imagina)\b{_GAP}\bsin (?:ninguna? )?(?:restricci(?:ón|ones)|límites?|filtros?|reglas?|censura)\b",
    ),
    (1, r"\b(?:a partir de ahora|desde ahora),? (?:eres|serás|debes)\b"),
)

_SHOW = r"\b(?:reveal|show|print|repeat|output|display|dump|leak|expose|recite|write out|give me|tell me|send me|copy)\b"
_HIDDEN = r"(?:system|initial|hidden|original|developer|secret|internal|pre-?)"
_PROMPT_LEAK = _scored(
    "prompt_leak",
    (
        3,
        rf"{_SHOW}{_SHORT}\byour\b{_SHORT}\b{_HIDDEN}\s?(?:prompt|instructions|message|rules|guidelines)\b",
    ),
    (
        3,
        rf"{_SHOW}{_SHORT}\b(?:the|all)\b{_SHORT}\b(?:text|words|lines|content|everything)\b{_SHORT}\babove\b[^!?\n]{{0,30}}\b(?:starting with|verbatim|you are|word for word|code block)\b",
        r"(?i)\babove\b",
    ),
    (2, r"\brepeat (?:everything|all(?: of)? the (?:words|text)|the (?:words|text|lines)) above\b"),
    (3, rf"\bwhat (?:is|are|was|were) your {_HIDDEN} ?(?:prompt|instructions|message)\b"),
    (
        2,
        rf"{_SHOW}{_SHORT}\b(?:the|this) (?:exact |full |entire |complete )?{_HIDDEN} (?:prompt|instructions|message)\b[^.!?\n]{{0,20}}\b(?:verbatim|word for word|above|in full|you were given)\b",
    ),
    (1, rf"{_SHOW}{_SHORT}\bthe {_HIDDEN} (?:prompt|instructions|message)\b"),
    (2, r"\b(?:starting|beginning|begins|starts) with [\"'“]?you are\b"),
    (
        3,
        rf"\b(?:zeige?|verrate|nenne?|wiederhole|gib|schreibe?|drucke)\b{_SHORT}\b(?:deine?[nr]?|ihre?n?)\b{_SHORT}\b(?:system-?\s?prompt|systemanweisung(?:en)?|systemnachricht|ursprünglichen? anweisungen|geheimen? anweisungen)\b",
    ),
    (
        3,
        rf"\b(?:montre|affiche|révèle|répète|donne|écris)(?:z|r)?\b{_GAP}\b(?:ton|tes|votre|vos)\b{_SHORT}\b(?:prompt système|invite système|message système|instructions (?:système|initiales|cachées|secrètes))\b",
    ),
    (
        3,
        rf"\b(?:muestra|muéstrame|revela|repite|imprime|dime|escribe)\b{_GAP}\b(?:tus?|sus?)\b{_SHORT}\b(?:prompt (?:de sistema|del sistema|inicial)|mensaje de(?:l)? sistema|instrucciones (?:del sistema|de sistema|iniciales|ocultas|secretas))\b",
    ),
)

_DELIMITER = _scored(
    "delimiter",
    (
        2,
        r"<\|(?:im_start|im_end|im_sep|system|user|assistant|endoftext|eot_id|start_header_id|end_header_id|begin_of_text|end_of_turn)\|>",
    ),
    (
        2,
        r"<</?SYS>>|\[/?INST\]|\[/?SYSTEM\]|<(?:start_of_turn|end_of_turn)>|</?(?:system_prompt|system-prompt|sys_prompt)>",
    ),
    (
        2,
        r"(?:^|\n)\s{0,4}(?:#{2,6}|-{3,10}|={3,10}|\[)\s{0,3}(?:end of |begin |new )?(?:system|admin|developer)(?: prompt| message| instructions?| override| note)(?:\]|:|\s{0,3}-{3}|\s{0,3}={3}|\n)",
    ),
    (1, r"(?:^|\n)\s{0,4}(?:system|assistant|developer)\s{0,2}:\s"),
    (2, r"-{3,10}\s?end of (?:user input|prompt|document|context|data)\s?-{3,10}"),
    (1, r"\"role\"\s{0,3}:\s{0,3}\"(?:system|developer)\""),
)

_TOOL_CALL = _scored(
    "tool_call",
    (
        2,
        r"</?(?:tool_call|tool_calls|function_call|function_calls|tool_response|tool_result|function_results|invoke)\b[^>\n]{0,60}>",
    ),
    (
        2,
        r"\[/?(?:TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\]|<\|(?:python_tag|tool_call|tool_calls_begin|plugin|action_start)\|>",
    ),
    (2, r"\bassistant to=functions\."),
    (1, r"\"(?:tool_calls|function_call)\"\s{0,3}:\s{0,3}[\[{]"),
)

INJECTION_RULES: Final = (_OVERRIDE, _ROLE_PLAY, _PROMPT_LEAK, _DELIMITER, _TOOL_CALL)
