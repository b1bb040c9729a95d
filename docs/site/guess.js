// A box to guess in, on every question of a lab whose answer is folded away.
document.querySelectorAll("details.guess").forEach((details) => {
  const form = document.createElement("form");
  const answer = Number(details.dataset.answer);
  const within = Number(details.dataset.within);
  const [number, ...why] = details.querySelector("p").textContent.split(": ");
  const says = why.join(": ").match(/[\d.,]*\d/g) || [];
  const hint = why.length && !says.includes(number.split(" ")[0]) ? `; hint: ${why.join(": ")}` : "";
  form.className = "guess";
  form.innerHTML = '<label>Your guess <input inputmode="decimal" autocomplete="off"></label> <button>Check</button> <output></output>';
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = form.querySelector("input").value.replace(/[,_\s]/g, "");
    const guess = Number(text);
    const right = text !== "" && Math.abs(guess - answer) <= within * Math.abs(answer) + 1e-12;
    const said = text === "" || Number.isNaN(guess) ? "a number, please" : right ? "right" : `too ${guess > answer ? "large" : "small"}${hint}`;
    form.querySelector("output").textContent = said;
    if (right) details.open = true;
  });
  const question = document.createElement("p");
  question.className = "guess";
  question.textContent = details.querySelector("summary").textContent;
  details.querySelector("summary").textContent = "Show the answer";
  details.before(question, form);
});
