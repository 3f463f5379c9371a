/**
 * @param {string} name  The operation that the key is for, such as "checkout of cart 17".
 * @param {RequestInit} options  As for fetch(). The body must not be a stream.
 * @returns {Promise<Response>}  The last answer; throws the last error if there was no answer.
 */
export async function idempotentFetch(
  name, url, options, {attempts = 8, seconds = 60, attemptSeconds = 20} = {}
) {
  const slot = `idempotency-key:${name}`, end = Date.now() + 1000 * seconds;
  const key = sessionStorage.getItem(slot) ?? crypto.randomUUID();
  sessionStorage.setItem(slot, key);  // A reloaded page finds the key here.
  const headers = new Headers(options.headers);
  headers.set("Idempotency-Key", `"${key}"`);
  for (let attempt = 1; ; attempt++) {
    let answer, said, problem, error;
    try {
      const left = Math.min(1000 * attemptSeconds, Math.max(end - Date.now(), 1));
      const signals = [AbortSignal.timeout(left), options.signal].filter(Boolean);
      answer = await fetch(url, {...options, headers, signal: AbortSignal.any(signals)});
      const text = await answer.clone().text();  // Throws if the answer is truncated.
      const type = answer.headers.get("Content-Type");
      said = /json/i.test(type) ? await new Response(text).json().catch(() => null) : null;
      problem = /^application\/problem\+json/i.test(type) ? said : null;
    } catch (caught) {
      if (options.signal?.aborted) throw caught;  // The caller gave up.
      [answer, error] = [null, caught];
    }
    const status = answer?.status ?? 0, after = answer?.headers.get("Retry-After");
    const retried = [0, 408, 425, 429].includes(status) || status >= 500
      || ([409, 423].includes(status) && after);
    if (!(problem?.retryable ?? retried)) {
      const undecided = [401, 403, 412, 428].includes(status) || answer.redirected
        || (status >= 400 && said === null)  // perhaps of a proxy or of a middleware, not of the view
        || /^(key_(missing|invalid|reused|stuck)|scope_missing)$/.test(said?.code ?? said?.error?.code);
      if (!undecided && sessionStorage.getItem(slot) === key) sessionStorage.removeItem(slot);
      return answer;
    }
    const asked = Number(after) || (Date.parse(after) - Date.now()) / 1000 || 0;
    const jitter = Math.random() * Math.min(10, 0.5 * 2 ** (attempt - 1));
    const pause = 1000 * (Math.max(asked, 0) + jitter);
    if (attempt >= attempts || Date.now() + pause >= end) {
      if (answer) return answer;
      throw error;
    }
    await new Promise(done => setTimeout(done, pause));
  }
}
